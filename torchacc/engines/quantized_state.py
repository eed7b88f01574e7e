"""Optimizer state that torchao keeps quantized, as the tensors that it is made of: codes, and a scale for each block.

A block is so many elements of a process's shard, in their order. Where all shards consist of whole blocks, these are
the blocks of the full tensor, and so can be put together again wherever shards consist of whole blocks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchacc.engines.optimizers import is_of_torchao, is_quantized
from torchacc.parallel.sharding import LocalShard

_CODES, _SCALE = ".codes", ".scale"
_SIGNED = "exp_avg"
"""The state that torchao keeps with a sign."""


def tensors_of(key: str, value: Any) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield the tensors of a quantized value, as this process has them.

    Args:
        key: The value's name in the optimizer's state.
        value: The value.

    Yields:
        A name, a flat tensor, and how many elements of the parameter each of its elements is for.
    """
    local = _local(value)
    for suffix in (_CODES, _SCALE):
        part = _bytes_of(getattr(local, suffix[1:])).reshape(-1)
        yield key + suffix, part, local.numel() // part.numel()


def is_part(key: str) -> bool:
    """Return whether a name of a saved state is that of a tensor that a quantized value is made of."""
    return key.endswith((_CODES, _SCALE))


def why_it_does_not_fit(
    optimizer: Any, parameter: torch.Tensor, local_shard: LocalShard, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Return why quantized state cannot be put together for a parameter here; None where it can.

    Args:
        optimizer: The optimizer that is to have it.
        parameter: One of its parameters.
        local_shard: What this process holds of it.
        shapes: The shapes of the tensors that were saved, by their names.
    """
    scales = [shape for name, shape in shapes.items() if name.endswith(_SCALE)]
    if not scales or not is_of_torchao(optimizer):
        return None
    block = optimizer.block_size
    if any(shape != (local_shard.numel // block,) for shape in scales):
        return f"it was saved in blocks of another size than {type(optimizer).__name__}'s, {block} elements"
    if any(part.start % block or part.numel % block for part in local_shard.slices):
        return f"the shards of other processes begin within a block of {block} elements"
    if not is_quantized(optimizer._new_buffer(parameter, True)):
        return f"a process's shard is too small here to be quantized in blocks of {block} elements"
    return None


def put_together(
    optimizer: Any, parameter: torch.Tensor, local_shard: LocalShard, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a parameter with quantized values in the place of what they are made of.

    Args:
        optimizer: The optimizer that is to have it.
        parameter: One of its parameters.
        local_shard: What this process holds of it.
        state: Values by name: of tensors of a quantized value full ones, or this process's where they lie like the
            parameter.
    """
    found = dict(state)
    if not is_of_torchao(optimizer):
        return found
    for key in [name.removesuffix(_SCALE) for name in state if name.endswith(_SCALE)]:
        value = optimizer._new_buffer(parameter, key == _SIGNED)
        for suffix in (_CODES, _SCALE):
            room = _bytes_of(getattr(_local(value), suffix[1:]))
            room.copy_(_own_part(found.pop(key + suffix), local_shard).view(room.shape))
        found[key] = value
    return found


def _own_part(given: Any, local_shard: LocalShard) -> Any:
    if hasattr(given, "_local_tensor"):
        return _local(given)
    block, flat = local_shard.numel // given.numel(), given.reshape(-1)
    return torch.cat([flat[part.start // block : part.stop // block] for part in local_shard.slices])


def _local(value: Any) -> Any:
    return getattr(value, "_local_tensor", value)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return codes in float8 as what they are in memory."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
