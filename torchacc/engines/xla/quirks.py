"""What model families need before they train well on XLA: kept in one place, each with the versions it is for.

A patch of another library is a context, entered for one forward of a sharded model and undone when it ends.
"""

import functools
import importlib.metadata
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch import nn
from torch.nn import functional

from torchacc.logging import get_logger

_log = get_logger(__name__)

_MASKING = SpecifierSet(">=4.53,<6")
"""Versions of transformers whose masks depend on values on the device."""


def prepare(model: nn.Module, *, partitioned: bool) -> None:
    """Change what a model needs to have changed for good.

    Args:
        model: The user's model.
        partitioned: Whether XLA partitions its program over devices.
    """
    _use_static_experts(model)
    if partitioned:
        _use_partitionable_layer_norm(model)


@contextmanager
def patches(model: nn.Module, *, packed: bool) -> Iterator[None]:
    """Hold the patches of other libraries for one forward.

    Args:
        model: The model that runs.
        packed: Whether its caller gives `position_ids`, so that several sequences may lie in a row.
    """
    with ExitStack() as stack:
        stack.enter_context(_attention_in_one_dtype())
        if hasattr(model, "config") and _has("transformers", _MASKING):
            stack.enter_context(_masks_without_questions(packed=packed))
        yield


@contextmanager
def _attention_in_one_dtype() -> Iterator[None]:
    """Give attention's inputs the dtype of autocast, which XLA's leaves as they are, unlike that of other devices.

    Queries and keys that were turned by their positions are float32, and values are not.
    """
    original = functional.scaled_dot_product_attention

    def lowered(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.get_autocast_dtype("xla")) if is_float else value

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.is_autocast_enabled("xla"):
            args, kwargs = tuple(map(lowered, args)), {name: lowered(value) for name, value in kwargs.items()}
        return original(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


@contextmanager
def _masks_without_questions(*, packed: bool) -> Iterator[None]:
    """Spare a forward the questions about its masks that are put to the device and waited for, each step anew.

    - Are the sequences packed? Where the caller gives no position_ids these are a plain range, and the answer is no.
      Where it does, the mask is built as for packed sequences, which is right for either.
    - Is nothing padded? The mask is built, which is right for either.
    """
    from transformers import masking_utils

    def packed_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if not packed:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    may_skip = getattr(masking_utils, "_ignore_bidirectional_mask_sdpa", None)

    def may_skip_mask(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        return padding_mask is None and may_skip is not None and may_skip(padding_mask, *args, **kwargs)

    answers = {
        "find_packed_sequence_indices": packed_indices,
        "fast_all": lambda tensor: False,
        "_ignore_bidirectional_mask_sdpa": may_skip_mask,
    }
    originals = {name: getattr(masking_utils, name) for name in answers if hasattr(masking_utils, name)}
    for name in originals:
        setattr(masking_utils, name, answers[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(masking_utils, name, original)


def _use_static_experts(model: nn.Module) -> None:
    """Let mixtures of experts run with shapes that do not depend on the data, which would compile at every step."""
    can_choose = getattr(model, "_can_set_experts_implementation", None)
    if can_choose is None or not can_choose() or getattr(model.config, "_experts_implementation", None) == "batched_mm":
        return
    _log.info("mixture of experts: using transformers' `batched_mm`, whose shapes do not depend on the data")
    model.set_experts_implementation("batched_mm")  # type: ignore[operator]


def _use_partitionable_layer_norm(model: nn.Module) -> None:
    """Compute LayerNorm from means: XLA's own lowering cannot be partitioned, and gathers all activations."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.forward = types.MethodType(_layer_norm, module)  # type: ignore[method-assign]


def _layer_norm(self: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    dims = tuple(range(-len(self.normalized_shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centered = wide - wide.mean(dims, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + self.eps)
    if self.weight is not None:
        y = y * self.weight
    if self.bias is not None:
        y = y + self.bias
    # Under autocast PyTorch's layer_norm returns float32 too.
    return y if torch.is_autocast_enabled("xla") else y.to(x.dtype)


@functools.cache
def _has(package: str, versions: SpecifierSet) -> bool:
    try:
        return importlib.metadata.version(package) in versions
    except importlib.metadata.PackageNotFoundError:
        return False
