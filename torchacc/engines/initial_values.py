"""Give parameters and buffers the values that are sharded, the same on all processes, in the dtypes that are kept.

A model may come on the meta device, where a checkpoint gives the values, or the initialisation that was recorded. It
may come in half precision, in which an optimizer would lose small updates.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from torchacc.engines import deferred
from torchacc.engines.deferred import is_recorded, take_values
from torchacc.engines.process_group import ProcessGroup
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.logging import get_logger
from torchacc.parallel.plan import PlannedParameter, ShardingPlan

_log = get_logger(__name__)

_HALF = (torch.bfloat16, torch.float16)

_UNTOUCHED = -7919
"""Stands in a buffer until the model has computed it."""
_DIGEST_WORDS = 1 << 20
"""Words that are looked at together, so that a large tensor needs little memory beside itself."""

T = TypeVar("T")


def is_without_weights(model: nn.Module) -> bool:
    """Return whether a model has parameters whose values only a checkpoint can give."""
    return any(parameter.is_meta and not is_recorded(parameter) for parameter in model.parameters())


def kept_dtype(dtype: torch.dtype, plan: ShardingPlan) -> torch.dtype:
    """Return the dtype in which a parameter of a dtype is kept, and stepped by an optimizer."""
    if plan.master_dtype == "bfloat16" and dtype.is_floating_point:
        return torch.bfloat16
    return torch.float32 if dtype in _HALF else dtype


def log_kept_dtypes(model: nn.Module, plan: ShardingPlan) -> None:
    """Log which parameters and buffers are kept in another dtype than that in which the model has them."""
    upcast = [each for each in model.parameters() if each.dtype in _HALF and plan.master_dtype == "float32"]
    count = len(upcast) + sum(buffer.dtype in _HALF for buffer in model.buffers())
    if plan.master_dtype == "bfloat16":
        _log.info("parameters are kept in bfloat16, where small updates are lost (config.compute.master_dtype)")
    if count:
        _log.info(
            "%d parameters and buffers were in half precision: they are kept in float32, as small updates would be "
            "lost, and computed with in %s (config.compute)",
            count,
            plan.compute_dtype,
        )


def materialise_buffers(model: nn.Module) -> None:
    """Give the buffers that lie on the meta device memory on the host, and those in half precision float32, in place.

    One whose initialisation was recorded gets it. Of the others a persistent one is zeros until a checkpoint is
    loaded, and one that no checkpoint holds is computed by the model's own `_init_weights()`, as transformers' models
    have it.

    Raises:
        ConfigError: A buffer that no checkpoint holds cannot be computed.
    """
    _make_recorded_buffers(model)
    for buffer in model.buffers():
        if buffer.dtype in _HALF:
            buffer.data = buffer.data.float()
    for prefix, module in model.named_modules():
        on_meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in on_meta:
            module._buffers[name] = torch.zeros_like(module._buffers[name], device="cpu")
        computed = [name for name in on_meta if name in module._non_persistent_buffers_set]
        for name in computed:
            module.get_buffer(name).fill_(_UNTOUCHED)
        init_weights = getattr(model, "_init_weights", None)
        if computed and callable(init_weights):
            with torch.no_grad():
                init_weights(module)
        left = [name for name in computed if module.get_buffer(name).eq(_UNTOUCHED).any()]
        if left:
            raise ConfigError(
                f"the buffer {left[0]!r} of {prefix or 'the model'!r} ({type(module).__name__}) is on the meta device, "
                "no checkpoint holds it, and the model has no _init_weights() that computes it: build the module on "
                "the CPU, or register the buffer with persistent=True"
            )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers to a device, a buffer that several modules share once."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                moved.setdefault(id(buffer), buffer.to(device))
                module._buffers[name] = moved[id(buffer)]


def _make_recorded_buffers(model: nn.Module) -> None:
    made = {buffer: take_values(buffer) for buffer in model.buffers()}
    for module in model.modules():
        module._buffers.update({name: made[b] for name, b in module._buffers.items() if b is not None})


def materialise_parameters(
    model: nn.Module, parameters: Iterable[PlannedParameter], plan: ShardingPlan, device: torch.device
) -> None:
    """Replace parameters on the meta device, or in another dtype than they are kept in, by others on a device.

    The values of one on the meta device are those that its initialisation gives it, where it was recorded, else
    undefined.

    Args:
        model: The model, whose modules get the new parameters.
        parameters: Those of a unit: of the model as a whole, no more than that is there twice.
        plan: The model's.
        device: Where the new parameters lie.
    """
    for planned in parameters:
        old = model.get_parameter(planned.name)
        dtype = kept_dtype(old.dtype, plan)
        if not old.is_meta and old.dtype == dtype:
            continue
        values = take_values(old).detach()
        if values.is_meta:
            values = torch.empty(planned.shape, dtype=dtype, device=device)
        new = nn.Parameter(values.to(device, dtype).contiguous(), requires_grad=planned.trainable)
        for owner, leaf in planned.owners(model):
            owner._parameters[leaf] = new


def align_replicas(model: nn.Module, group: ProcessGroup, *, broadcast: bool) -> None:
    """Broadcast rank 0's parameters and buffers to all processes. Collective: every process.

    Args:
        model: The model on the host.
        group: The job's processes.
        broadcast: Copy without a look; otherwise only where the processes differ, with a line that says so.

    Raises:
        ConfigError: The processes built models of different shapes, on the meta device some of them only, or deferred
            other random numbers.
    """
    state: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
    own = _BuiltModel(
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        places={name: "on the meta device" if tensor.is_meta else "in memory" for name, tensor in state.items()},
        recipes=deferred.fingerprints(model),
        values={} if broadcast else _digests(held, group.job),
    )
    found = group.all_gather_objects(own)
    _check_alike(found)
    if not broadcast:
        differing = {name for name, *_ in _differences([each.values for each in found])}
        if not differing:
            return
        _log.info(
            "%d of the model's tensors differ between the ranks (%s, …), as without a common torch.manual_seed(): "
            "all take rank 0's",
            len(differing),
            min(differing),
        )
    with torch.no_grad():
        for tensor in held.values():
            tensor.copy_(group.broadcast(tensor.detach().contiguous()))


@dataclass(frozen=True)
class _BuiltModel:
    """What a process has built, by the names of tensors."""

    shapes: dict[str, tuple[int, ...]]
    places: dict[str, str]
    recipes: dict[str, str]
    """Digests of the initialisations that were recorded."""
    values: dict[str, int]
    """Digests of the values that there are."""


def _check_alike(found: Sequence[_BuiltModel]) -> None:
    for name, rank, first, other in _differences([each.shapes for each in found]):
        raise ConfigError(
            f"the processes built different models: {name!r} has the shape {first} on rank 0 and {other} on rank {rank}"
        )
    for name, rank, on_first, on_other in _differences([each.places for each in found]):
        raise ConfigError(
            f"the processes built different models: {name!r} is {on_first} on rank 0 and {on_other} on rank {rank}. "
            "Build it the same way on every rank: in memory, by deferred_init(), or under torch.device('meta')"
        )
    for name, rank, _, _ in _differences([each.recipes for each in found]):
        raise ConfigError(
            f"deferred_init() on rank {rank} would give {name!r} other values than on rank 0: call "
            "torch.manual_seed() with the same number on every rank before it"
        )


def _differences(found: Sequence[dict[str, T]]) -> Iterator[tuple[str, int, T | None, T | None]]:
    """Yield where a rank's entries are not rank 0's: name, rank, rank 0's and the rank's."""
    first, *others = found
    for rank, other in enumerate(others, start=1):
        for name in (*other, *first):
            if other.get(name) != first.get(name):
                yield name, rank, first.get(name), other.get(name)


def _digests(state: dict[str, torch.Tensor], job: Job) -> dict[str, int]:
    """Return a number for the values of each tensor, by as many threads as this process has cores to itself.

    Launchers leave PyTorch a single thread in each process, and without the interpreter's lock its operations run
    beside each other.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max(1, cores // job.local_num_processes)) as threads:
        return {name: _digest(tensor, threads) for name, tensor in state.items()}


def _digest(tensor: torch.Tensor, threads: ThreadPoolExecutor) -> int:
    words = tensor.detach().cpu().contiguous().reshape(-1).clone().view(torch.uint8)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    # Odd multipliers make the sum depend on the order of the words.
    multipliers = 2 * torch.arange(min(words.numel(), _DIGEST_WORDS)) + 1

    def of_part(start: int) -> int:
        part = words[start : start + _DIGEST_WORDS]
        return int((part * multipliers[: part.numel()]).sum()) * (2 * start + 1)

    return sum(threads.map(of_part, range(0, words.numel(), _DIGEST_WORDS)))
