"""What this process's devices have of tensors that are split over more of them, copied to the host."""

from collections.abc import Mapping, Sequence

import torch

from torchacc.engines.xla.runtime import to_host
from torchacc.parallel.hosts import Box


def local_pieces(tensors: Sequence[torch.Tensor]) -> list[dict[Box, torch.Tensor]]:
    """Copy to the host what this process's devices have of tensors, from their shards.

    `to_host()` would compile a program that gathers them, for each anew.

    Returns:
        For each tensor its parts; of one that is not split a single one, which is all of it.
    """
    from torch_xla import _XLAC

    # What the program that still runs will have computed has no shards to be read yet.
    _XLAC._xla_wait_device_ops([])
    split = [tensor for tensor in tensors if _XLAC._get_xla_sharding_spec(tensor)]
    shards = iter(_XLAC._get_local_shards(split))
    places = iter(_XLAC._get_local_shard_replica_and_indices(split))
    found: list[dict[Box, torch.Tensor]] = []
    for tensor in tensors:
        full = tuple(map(range, tensor.shape))
        if not any(tensor is other for other in split):
            found.append({full: to_host([tensor])[0]})
            continue
        own: dict[Box, torch.Tensor] = {}
        for (shard, _), (_, indices) in zip(next(shards), next(places), strict=True):
            # An ellipsis, where the tensor is replicated on each device.
            box = full if indices is ... else tuple(range(at.start, at.stop) for at in indices)
            own.setdefault(box, shard)
        found.append(own)
    return found


def joined_pieces(shape: Sequence[int], pieces: Mapping[Box, torch.Tensor]) -> torch.Tensor:
    """Return a tensor of the full shape with the values of its parts, and no others."""
    full = next(iter(pieces.values())).new_empty(tuple(shape))
    for box, piece in pieces.items():
        full[tuple(slice(at.start, at.stop) for at in box)] = piece
    return full
