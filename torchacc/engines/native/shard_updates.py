"""Lets torch.optim's element-wise optimizers update this process's shards themselves, and not distributed tensors.

Each operation on a distributed tensor is dispatched in Python, which takes longer than the operation on a small shard.
An update that goes element by element does to the shard what it does to the distributed tensor, without that.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from torchacc.engines.native.shard_arithmetic import is_of_model
from torchacc.engines.optimizers import ELEMENTWISE
from torchacc.engines.patches import torch_patches

_PREFIXES = ("_single_tensor_", "_multi_tensor_", "_fused_")
_KNOWN = {f"{prefix}{name.lower()}" for prefix in _PREFIXES for name in ELEMENTWISE}


@functools.cache
def install() -> None:
    """Patch torch.optim to update local shards, until the process ends."""
    torch_patches.hold_until_exit(torch_patches.updates_through(_update, _PREFIXES))


def _update(update: Callable[..., None], parameters: Sequence[Any], *args: Any, **options: Any) -> None:
    """Run an update of torch.optim's: of a group's parameters, gradients and states, lists that are equally long."""
    given = [parameters, *args]
    lists = [each for each in given if isinstance(each, list)]
    if update.__name__ not in _KNOWN or options.get("differentiable") or not _lie_alike(parameters, lists):
        update(*given, **options)
        return
    held = _indices_to_update(parameters, lists, options)
    local = [[_local(listed[index]) for index in held] if listed else [] for listed in lists]
    replaced = iter(local)
    with torch._C.DisableTorchFunctionSubclass():
        update(*(next(replaced) if isinstance(each, list) else each for each in given), **options)
        for listed, new in zip(lists, local, strict=True):
            _hand_back(parameters, listed, dict(zip(held, new, strict=False)))
        for steps in filter(_are_numbers, lists):
            for index in set(range(len(parameters))) - set(held):
                steps[index] += 1
        increment_version(parameters)


def _indices_to_update(parameters: Sequence[Any], lists: list[list[Any]], options: Mapping[str, Any]) -> list[int]:
    """Return which parameters an update runs for: not those without elements here, as all of other stages.

    All where that does more than count their steps: makes a state, changes other numbers, or leaves a step out.
    """
    every = list(range(len(parameters)))
    has_more = sum(map(_are_numbers, lists)) > 1 or options.get("found_inf") is not None
    if has_more or any(each is None for listed in lists for each in listed):
        return every
    return [index for index in every if parameters[index]._local_tensor.numel()]


def _are_numbers(listed: Sequence[Any]) -> bool:
    """Return whether a list has one number for each parameter, as the steps that it was updated in."""
    first = listed[0] if listed else None
    return isinstance(first, torch.Tensor) and not isinstance(first, DTensor) and not first.dim()


def _lie_alike(parameters: Sequence[Any], lists: Sequence[list[Any]]) -> bool:
    """Return whether all parameters are shards, and what belongs to each lies like it or is not a DTensor."""
    if torch.compiler.is_compiling() or not all(map(is_of_model, parameters)):
        return False
    for listed in lists:
        for parameter, each in zip(parameters, listed, strict=False):
            if isinstance(each, DTensor) and each._spec.placements != parameter._spec.placements:
                return False
            if not isinstance(each, DTensor) and isinstance(each, torch.Tensor) and each.dim():
                return False
    return True


def _local(each: Any) -> Any:
    return each._local_tensor if isinstance(each, DTensor) else each


def _hand_back(parameters: Sequence[Any], listed: list[Any], new: Mapping[int, Any]) -> None:
    """Put states that an update has made, as SGD makes its first momentum, into the list that it was given."""
    for index, after in new.items():
        if after is not _local(listed[index]):
            spec = parameters[index]._spec
            meta = spec.tensor_meta._replace(dtype=after.dtype)
            listed[index] = DTensor(after, replace(spec, tensor_meta=meta), requires_grad=False)
