"""What is sharded as one tensor between processes: a parameter, or several flattened."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from torchacc.engines.xla.gather import Weight
from torchacc.parallel.sharding import RowLayout


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after another as one of a single dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return views of a flat tensor in these shapes; what is left over is ignored."""
    sizes = [prod(shape) for shape in shapes]
    parts = flat.narrow(0, 0, sum(sizes)).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass(eq=False)
class GatheredParameter:
    """What is gathered as one tensor: a parameter, or those of a unit that are flattened together."""

    shard: nn.Parameter
    rows: RowLayout
    weights: list[Weight]
    is_flat: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the parameter travels in."""
        return self.shard.dtype if self.is_flat else self.weights[0].dtype

    def parts(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights in the full parameter, in the dtypes that they are computed with."""
        parts = unflatten(full, [weight.shape for weight in self.weights]) if self.is_flat else [full]
        return [part.to(weight.dtype) for part, weight in zip(parts, self.weights, strict=True)]
