"""What is sharded as one tensor between processes: a parameter, or several flattened. Shapes and rows only."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Rows:
    """How the first dimension of a tensor is cut into equal shards, the last ones padded with zeros."""

    shape: tuple[int, ...]
    """The whole tensor's shape."""
    num_shards: int

    @property
    def per_shard(self) -> int:
        """Rows of one shard."""
        return -(-self.shape[0] // self.num_shards)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of one shard."""
        return (self.per_shard, *self.shape[1:])

    @property
    def shard_numel(self) -> int:
        """The number of elements of one shard."""
        return prod(self.shard_shape)

    def pad(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor with rows of zeros up to `num_shards * per_shard`."""
        missing = self.num_shards * self.per_shard - self.shape[0]
        return torch.cat([whole, whole.new_zeros(missing, *self.shape[1:])]) if missing else whole

    def cut(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return a copy of one shard of the whole tensor."""
        return self.pad(whole).narrow(0, index * self.per_shard, self.per_shard).clone()

    def join(self, shards: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from its shards, a tensor of shape (num_shards, shard_numel)."""
        return shards.reshape(self.num_shards * self.per_shard, *self.shape[1:]).narrow(0, 0, self.shape[0])


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after another as one of a single dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return views of a flat tensor in these shapes; what is left over is ignored."""
    sizes = [prod(shape) for shape in shapes]
    parts = flat.narrow(0, 0, sum(sizes)).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
