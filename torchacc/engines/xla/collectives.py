"""Exchange weights, gradients and a few scalars between processes with one XLA device each."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from torchacc.engines.xla.gather import Gatherer, Weight
from torchacc.engines.xla.sharded_tensor import Reader
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
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


class ParameterGatherer(Gatherer):
    """A unit whose weights lie in sharded parameters, of which this process holds shards."""

    def __init__(self, parameters: list[GatheredParameter]) -> None:
        super().__init__([weight for parameter in parameters for weight in parameter.weights])
        self.parameters = parameters

    @abstractmethod
    def read(self, parameter: GatheredParameter) -> torch.Tensor:
        """Return a full parameter in the dtype of its shards, connected to them for autograd. Collective."""


class Collectives(Reader):
    """The collectives of one model, by one means of communication."""

    def __init__(self, mesh: Mesh, rank: int, check_same_call: Callable[[str], None]) -> None:
        """Take a process's place on the mesh.

        Args:
            mesh: The mesh.
            rank: The process, which is as many on the mesh.
            check_same_call: Raises unless every process calls it with the same words.
        """
        self.num_devices = mesh.num_devices
        self.num_shards = mesh.num_shards
        self.shard_index = mesh.index(rank, Role.SHARD)
        self._check_same_call = check_same_call
        self.holds_gradients = False
        """Whether backward keeps full gradients, to be reduced by a later one."""
        self.reduce_dtype = torch.float32
        """The dtype in which gradients are summed; float32 stands for float64, too, where parameters have it."""

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the gradients of parameters of a dtype are summed."""
        return torch.promote_types(dtype, torch.float32) if self.reduce_dtype == torch.float32 else self.reduce_dtype

    def check_same_call(self, what: str) -> None:
        """Raise unless every process reads the same now. Collective: every process."""
        self._check_same_call(what)

    @abstractmethod
    def make_gatherer(self, parameters: list[GatheredParameter], *, reshard_after_forward: bool) -> ParameterGatherer:
        """Return the gatherer of a unit with these parameters."""

    def begin_backward(self) -> None:
        """Record that a backward of the model has begun, from inside of it."""

    def end_failed_backward(self, *, accumulates: bool) -> bool:
        """Drop what a backward that has raised has left, if it was one of the model.

        Args:
            accumulates: Whether it was a `backward()`, which adds to the gradients of parameters.

        Returns:
            Whether a part of the gradients is lost with it.
        """
        return False

    def drop_gradients(self) -> None:
        """Drop the full gradients that have not been reduced."""

    @abstractmethod
    def average(self, scalars: torch.Tensor) -> torch.Tensor:
        """Return the mean over all devices of a device tensor of shape (n,). Collective: every process."""


def weight_places(parameters: Sequence[GatheredParameter]) -> dict[Weight, tuple[GatheredParameter, int]]:
    """Return for each weight its parameter, and its index in there."""
    return {weight: (parameter, index) for parameter in parameters for index, weight in enumerate(parameter.weights)}
