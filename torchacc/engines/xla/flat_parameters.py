"""What is sharded as one tensor between processes: a parameter, or several flattened."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from torchacc.engines.xla.gather import Weight


@dataclass(frozen=True)
class Rows:
    """How the first dimension of a tensor is cut into equal shards, the last ones padded with zeros.

    A tensor without dimensions is cut as one of a single row.
    """

    shape: tuple[int, ...]
    """The whole tensor's shape."""
    num_shards: int

    @property
    def num_rows(self) -> int:
        """Rows of the whole tensor."""
        return self.shape[0] if self.shape else 1

    @property
    def per_shard(self) -> int:
        """Rows of one shard."""
        return -(-self.num_rows // self.num_shards)

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
        whole = whole if self.shape else whole.reshape(1)
        missing = self.num_shards * self.per_shard - self.num_rows
        return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole

    def cut(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        """Return a copy of one shard of the whole tensor."""
        return self.pad(whole).narrow(0, index * self.per_shard, self.per_shard).clone()

    def join(self, shards: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor from its shards, a tensor of shape (num_shards, shard_numel)."""
        rows = shards.reshape(self.num_shards * self.per_shard, *self.shape[1:]).narrow(0, 0, self.num_rows)
        return rows if self.shape else rows.reshape(())


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after another as one of a single dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return views of a flat tensor in these shapes; what is left over is ignored."""
    sizes = [prod(shape) for shape in shapes]
    parts = flat.narrow(0, 0, sum(sizes)).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass(eq=False)
class Block:
    """A parameter, or those of a unit that are flattened together."""

    shard: nn.Parameter
    rows: Rows
    weights: list[Weight]
    is_flat: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the block travels in."""
        return self.shard.dtype if self.is_flat else self.weights[0].dtype

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights in the whole block, in the dtypes that they are computed with."""
        parts = unflatten(whole, [weight.shape for weight in self.weights]) if self.is_flat else [whole]
        return [part.to(weight.dtype) for part, weight in zip(parts, self.weights, strict=True)]
