"""The rule of sharding: which elements of which tensor a device holds. Plain integers, and tensors cut by them.

Tensor parallelism comes first: it leaves a device an equal part of some tensors along one dimension (`DimSlice`). That
is sharded by the layout that an engine names:

| layout | cut into shards | of |
|---|---|---|
| `RowLayout` | the first dimension, the last shards padded | `fully_shard`, one XLA process per device |
| `DivisibleDimLayout` | the first dimension that divides; where none does, every device has all | XLA's SPMD |
| `FlatLayout` | the flattened tensor, in multiples of some elements | torch_xla's FSDP: its rank files |

A unit that is flattened is one tensor of a single dimension, sharded by its rows. Engines, the memory plan, checkpoints
and rank files ask here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

import torch

from torchacc.parallel.axes import ParameterSpec, Role, axes_in, dim_over, entry_of
from torchacc.parallel.mesh import Mesh

TORCH_XLA_MULTIPLE = 128
"""torch_xla's `XlaFullyShardedDataParallel` pads each shard of a flat parameter to a multiple of so many elements."""


def chunk(length: int, count: int, index: int) -> range:
    """Return which of `length` things one of `count` devices has: equally many, the last devices fewer or none."""
    each = -(-length // count)
    return range(min(each * index, length), min(each * (index + 1), length))


# Layouts


@dataclass(frozen=True)
class ShardLayout(ABC):
    """How one tensor is cut into shards of equal size."""

    shape: tuple[int, ...]
    """The shape of the unsharded tensor."""
    num_shards: int

    @property
    @abstractmethod
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of each shard, padding included."""

    @property
    def shard_numel(self) -> int:
        """Elements of each shard, padding included."""
        return prod(self.shard_shape)

    @property
    def numel(self) -> int:
        """Elements of the unsharded tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class RowLayout(ShardLayout):
    """The first dimension is cut, and the last shards are padded with zeros."""

    @property
    def num_rows(self) -> int:
        """Rows of the unsharded tensor: its first dimension, and one for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def rows_per_shard(self) -> int:
        """Rows of each shard, padding included."""
        return -(-self.num_rows // self.num_shards)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of each shard, padding included."""
        return (self.rows_per_shard, *self.shape[1:])

    def rows(self, index: int) -> range:
        """Return which rows of the unsharded tensor a shard has, padding left out."""
        return chunk(self.num_rows, self.num_shards, index)

    def pad(self, full: torch.Tensor) -> torch.Tensor:
        """Return the unsharded tensor with rows of zeros up to `num_shards * rows_per_shard`."""
        full = full if self.shape else full.reshape(1)
        missing = self.num_shards * self.rows_per_shard - self.num_rows
        return torch.cat([full, full.new_zeros(missing, *full.shape[1:])]) if missing else full

    def shard(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Return a copy of one shard of the unsharded tensor, padded."""
        return self.pad(full).narrow(0, index * self.rows_per_shard, self.rows_per_shard).clone()

    def unshard(self, shards: torch.Tensor) -> torch.Tensor:
        """Return the unsharded tensor from its shards, a tensor of `num_shards * shard_numel` elements."""
        rows = shards.reshape(self.num_shards * self.rows_per_shard, *self.shape[1:]).narrow(0, 0, self.num_rows)
        return rows if self.shape else rows.reshape(())


@dataclass(frozen=True)
class FlatLayout(ShardLayout):
    """The flattened tensor is cut, and the last shards are padded."""

    multiple: int = 1
    """Each shard has a multiple of so many elements: `TORCH_XLA_MULTIPLE` in torch_xla's rank files."""

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of each shard, padding included: one dimension."""
        return (-(-self.numel // (self.num_shards * self.multiple)) * self.multiple,)


@dataclass(frozen=True)
class DivisibleDimLayout(ShardLayout):
    """The first dimension that divides is cut; where none does, every device holds the full tensor."""

    taken: frozenset[int] = frozenset()
    """Dimensions that are split over other axes."""

    @property
    def dim(self) -> int | None:
        """The dimension that is cut. Along another than the first, each shard is transposed to be gathered."""
        size = self.num_shards
        free = ((dim, n) for dim, n in enumerate(self.shape) if dim not in self.taken)
        return next((dim for dim, n in free if size > 1 and n >= size and n % size == 0), None)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what each device holds."""
        return tuple(n // self.num_shards if dim == self.dim else n for dim, n in enumerate(self.shape))


# What a device holds


@dataclass(frozen=True)
class TensorSlice:
    """Consecutive elements of a full tensor in row-major order, and where a device holds them."""

    name: str
    """The full tensor's original name."""
    shape: tuple[int, ...]
    """The full tensor's shape."""
    start: int
    """The first element, counted in the flattened full tensor."""
    stop: int
    """The first element after the last one; equal to `start` where there are none."""
    offset: int = 0
    """Where they begin in the device's flattened tensor."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def part(self, index: int, count: int) -> "TensorSlice":
        """Return what one of `count` devices with equal parts of this one has, the last ones possibly less."""
        own = chunk(self.numel, count, index)
        return replace(self, start=self.start + own.start, stop=self.start + own.stop, offset=self.offset + own.start)


@dataclass(frozen=True)
class DimSlice:
    """One of the equal parts of a full tensor along a dimension: what tensor parallelism leaves a device."""

    dim: int
    index: int
    count: int

    def part_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the part."""
        return tuple(n // self.count if dim == self.dim else n for dim, n in enumerate(shape))


@dataclass(frozen=True)
class ShardCoordinates:
    """A process's place among those that hold a model."""

    processes_per_replica: int = 1
    """Processes that hold one copy of the parameters together."""
    shard_index: int = 0
    """Which of these processes this one is."""
    num_replicas: int = 1
    """Copies of the parameters in the job."""
    replica: int = 0
    """Which of the copies this process holds a part of."""
    is_contiguous: bool = True
    """Whether a process holds consecutive elements of a parameter, as rank files and `TensorShard`s have them."""

    @property
    def is_split(self) -> bool:
        """Whether it takes several processes to hold one copy of the parameters."""
        return self.processes_per_replica > 1


@dataclass(frozen=True)
class LocalShard:
    """What one device holds of a parameter that an optimizer sees: a shard of one tensor, or of several flattened."""

    key: str
    """The parameter's name in the process's own `state_dict()`; a flat one has a name of its own."""
    members: tuple[tuple[str, tuple[int, ...]], ...]
    """Original names and shapes of the full tensors, which lie one after another."""
    shard_numel: int
    """Elements of each shard, padding included; those of the last ones may be left out."""
    index: int
    """Which of the shards it is."""
    within: DimSlice | None = None
    """Of which part of the one tensor it is a shard; None where that is not split."""

    @property
    def numel(self) -> int:
        """Elements of the full tensors."""
        return sum(prod(shape) for _, shape in self.members)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Original names of the full tensors."""
        return tuple(name for name, _ in self.members)

    @cached_property
    def slices(self) -> tuple[TensorSlice, ...]:
        """What the shard has of each full tensor; of some it may have nothing."""
        names, shapes = zip(*self.members, strict=True)
        start = self.index * self.shard_numel
        if self.within is not None:
            return tuple(_slices_of_part(names[0], shapes[0], self.within, start, start + self.shard_numel))
        return flat_slices(names, shapes, start, start + self.shard_numel)


def unsharded(name: str, shape: tuple[int, ...]) -> LocalShard:
    """Return the shard that is the full parameter: of a scalar, or in a process that drives all devices."""
    return LocalShard(name, ((name, shape),), prod(shape), index=0)


def local_shard(name: str, shape: tuple[int, ...], mesh: Mesh, device: int, spec: ParameterSpec = ()) -> LocalShard:
    """Return what a device holds of a parameter: all of a scalar, else rows of what tensor parallelism leaves it.

    Args:
        name: The parameter's original name.
        shape: Its full shape.
        mesh: The mesh.
        device: A device on it.
        spec: What the tensor-parallel plan says of the parameter.
    """
    if not shape:
        return unsharded(name, shape)
    dim, count = dim_over(spec, Role.TENSOR), mesh.size(Role.TENSOR)
    within = DimSlice(dim, mesh.index(device, Role.TENSOR), count) if dim is not None and count > 1 else None
    rows = RowLayout(within.part_shape(shape) if within else shape, mesh.num_shards)
    return LocalShard(name, ((name, shape),), rows.shard_numel, mesh.index(device, Role.SHARD), within)


def empty_shard(shard: LocalShard, mesh: Mesh) -> LocalShard:
    """Return the shard of a device that holds nothing of a parameter, as another stage does: one after the last."""
    return replace(shard, index=mesh.num_shards)


def replicated_over(shard: LocalShard) -> tuple[Role, ...]:
    """Return the roles of the axes along which all devices hold this same shard, one that `local_shard()` made."""
    roles = [Role.REPLICATE]
    if shard.within is None:
        roles.append(Role.TENSOR)
    if not shard.members[0][1]:
        roles.append(Role.SHARD)
    return tuple(roles)


def unshard(shards: Iterable[tuple[LocalShard, torch.Tensor]]) -> torch.Tensor:
    """Return the full tensors, flat and one after another, from what all devices hold of them, also more than once."""
    pairs = list(shards)
    first, data = pairs[0]
    full = data.new_empty(first.numel)
    begins = dict(zip(first.names, accumulate((prod(shape) for _, shape in first.members), initial=0), strict=False))
    for shard, local in pairs:
        for part in shard.slices:
            start = begins[part.name] + part.start
            full[start : start + part.numel] = local[part.offset : part.offset + part.numel]
    return full


def partition_spec(shape: Sequence[int], mesh: Mesh, planned: ParameterSpec = ()) -> ParameterSpec:
    """Return which axes each dimension of a parameter is split over where one program drives all devices.

    Args:
        shape: Its full shape.
        mesh: The mesh.
        planned: What the tensor-parallel plan says of it. The axes of shards that this leaves go to the first
            dimension that is left and divides.
    """
    spec = [
        entry_of(axis for axis in axes_in(entry) if mesh.axis_size(axis) > 1)
        for entry in planned or (None,) * len(shape)
    ]
    used = {axis for entry in spec for axis in axes_in(entry)}
    left = [axis for axis in mesh.axes(Role.SHARD) if mesh.axis_size(axis) > 1 and axis not in used]
    taken = frozenset(dim for dim, entry in enumerate(spec) if entry is not None)
    dim = DivisibleDimLayout(tuple(shape), prod(mesh.axis_size(axis) for axis in left), taken).dim
    if dim is not None:
        spec[dim] = entry_of(left)
    return tuple(spec)


def partitioned_shape(shape: Sequence[int], mesh: Mesh, spec: ParameterSpec) -> tuple[int, ...]:
    """Return the shape of what each device holds of a parameter that is split by a spec."""
    return tuple(
        n // prod(mesh.axis_size(axis) for axis in axes_in(entry)) for n, entry in zip(shape, spec, strict=True)
    )


def flat_slices(
    names: Iterable[str], shapes: Iterable[Iterable[int]], start: int, stop: int
) -> tuple[TensorSlice, ...]:
    """Return what the elements from `start` to `stop` are of tensors that are flattened one after another.

    Returns:
        A slice for each tensor that has some of them.
    """
    slices: list[TensorSlice] = []
    begin = 0
    for name, shape in zip(names, map(tuple, shapes), strict=True):
        end = begin + prod(shape)
        first, last = max(start, begin), min(stop, end)
        if first < last:
            slices.append(TensorSlice(name, shape, first - begin, last - begin, offset=first - start))
        begin = end
    return tuple(slices)


def _slices_of_part(
    name: str, shape: tuple[int, ...], within: DimSlice, start: int, stop: int
) -> Iterator[TensorSlice]:
    """Yield the slices of a full tensor that are the elements from `start` to `stop` of a part of it, flattened."""
    row = prod(shape[within.dim :]) // within.count  # as long as this, neighbours in the part are so in the tensor
    stop = min(stop, prod(shape) // within.count)
    position = start
    while position < stop:
        index, inside = divmod(position, row)
        end = min(stop, (index + 1) * row)
        first = (index * within.count + within.index) * row + inside
        yield TensorSlice(name, shape, first, first + end - position, offset=position - start)
        position = end
