"""Functions that run on each device's part of tensors, in a program that XLA partitions everywhere else."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_MANUAL = 4  # torch_xla.distributed.spmd.ShardingType: of what each device has for itself


def shard_map(
    function: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    parts: Sequence[int],
    sharding: Callable[[int], Any],
) -> list[torch.Tensor]:
    """Run a function on each device's part of tensors, and return what it returns, joined.

    Args:
        function: Takes and returns tensors; it records no exchange between devices.
        tensors: What it takes, as all devices have it together.
        parts: Into how many parts the first dimensions are split, of what it takes and of what it returns.
        sharding: Returns torch_xla's OpSharding of a tensor with that many dimensions, for these parts.
    """
    from torch_xla import _XLAC

    local = []
    for tensor in tensors:
        copy = tensor.clone()  # which is annotated in place
        _XLAC._xla_mark_sharding(copy, sharding(copy.dim()))
        local.append(_XLAC._spmd_full_to_shard_shape(copy))
    joined = []
    for result in function(*local):
        _XLAC._mark_manual_sharding(result, _XLAC.OpSharding([], [], [], _MANUAL))
        sizes = [size * part for size, part in zip(result.shape, parts, strict=False)]
        shape = [*sizes, *result.shape[len(sizes) :]]
        joined.append(_XLAC._spmd_shard_to_full_shape(result, sharding(result.dim()), shape, result.dtype))
    return joined
