"""Which process drives which devices of a mesh, where one program runs on several hosts: what each feeds and holds.

Plain integers. Every process works with tensors of the full shape, of which it fills in what its own devices need: the
rows of a batch that they see, the tiles of a parameter that they hold.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

import torch

from torchacc.parallel.axes import ParameterSpec, axes_in
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import LocalShard, TensorSlice, partitioned_shape

Box = tuple[range, ...]
"""A part of a tensor: which indices along each dimension."""
_Holders = Mapping[tuple[int, ...], tuple[int, ...]]
"""The processes that hold each tile of a tensor, by the tile's place along each dimension."""


@dataclass(frozen=True)
class LocalTiles(LocalShard):
    """What a process holds of one tensor that is cut into tiles: those of its devices, in the full tensor's order."""

    runs: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """First element, the one after the last, and the processes that hold them, in the full tensor's order."""

    @cached_property
    def slices(self) -> tuple[TensorSlice, ...]:
        """What the process has of the full tensor, of which one run follows another."""
        [(name, shape)] = self.members
        found, offset = [], 0
        for start, stop, _ in self.runs:
            found.append(TensorSlice(name, shape, start, stop, offset))
            offset += stop - start
        return tuple(found)

    @property
    def replicas(self) -> list[tuple[int, int]]:
        """For each slice which of the processes that hold it this one is, and how many there are."""
        return [(holders.index(self.index), len(holders)) for _, _, holders in self.runs]


@dataclass(frozen=True)
class Hosts:
    """The processes of a job, each of which drives some of the mesh's devices."""

    mesh: Mesh
    process_of_device: tuple[int, ...]
    """The rank of the process that drives each device, by its number on the mesh."""
    _holders: dict[ParameterSpec, _Holders] = field(default_factory=dict, compare=False)

    def data_parallel_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the data-parallel devices, by index, that a process feeds, in ascending order."""
        driven = (device for device, driver in enumerate(self.process_of_device) if driver == rank)
        return tuple(sorted({self.mesh.data_parallel_rank(device) for device in driven}))

    def whole_rows(self, own: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a tensor with the rows of all data-parallel devices, of which those that a process feeds have values.

        Args:
            own: The rows of the devices that the process feeds, one device's after another's.
            rank: The process.
        """
        shards = self.data_parallel_ranks(rank)
        each = own.shape[0] // len(shards)
        full = own.new_empty(each * self.mesh.data_parallel_size, *own.shape[1:])
        for shard, rows in zip(shards, own.split(each), strict=True):
            full[shard * each : (shard + 1) * each] = rows
        return full

    def held(self, name: str, shape: tuple[int, ...], spec: ParameterSpec, rank: int) -> LocalTiles:
        """Return what a process holds of a parameter.

        Args:
            name: The parameter's original name.
            shape: Its full shape.
            spec: The axes that shard each dimension; their sizes divide it.
            rank: The process.
        """
        holders = self._holders_of(spec)
        tile_shape = partitioned_shape(shape, self.mesh, spec)
        boxes: dict[tuple[int, ...], list[Box]] = {}
        for tile, ranks in holders.items():
            if rank in ranks:
                box = tuple(range(at * size, (at + 1) * size) for at, size in zip(tile, tile_shape, strict=True))
                boxes.setdefault(ranks, []).append(box)
        runs = [(start, stop, ranks) for ranks, own in boxes.items() for start, stop in element_runs(shape, own)]
        most = max(Counter(each for ranks in holders.values() for each in ranks).values())
        return LocalTiles(name, ((name, shape),), prod(tile_shape) * most, rank, runs=tuple(sorted(runs)))

    def _holders_of(self, spec: ParameterSpec) -> _Holders:
        """Return the processes that hold each tile of a tensor, by the tile's place along each dimension."""
        if spec not in self._holders:
            found: dict[tuple[int, ...], set[int]] = {}
            for device, rank in enumerate(self.process_of_device):
                tile = tuple(self.mesh.index_along(device, axes_in(entry)) for entry in spec)
                found.setdefault(tile, set()).add(rank)
            self._holders[spec] = {tile: tuple(sorted(ranks)) for tile, ranks in found.items()}
        return self._holders[spec]


def element_runs(shape: Sequence[int], boxes: Iterable[Box]) -> list[tuple[int, int]]:
    """Return which elements of a flattened tensor some parts have, in ascending order: the first, and after the last.

    Args:
        shape: The full tensor's.
        boxes: The parts, which do not overlap.
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(run for box in boxes for run in _runs_of(shape, box)):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _runs_of(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    cut = max((dim for dim, at in enumerate(box) if len(at) < shape[dim]), default=0)
    row = prod(shape[cut + 1 :])
    length = len(box[cut]) * row if box else 1
    for at in product(*box[:cut]):
        start = 0
        for place, size in zip((*at, box[cut].start if box else 0), shape, strict=False):
            start = start * size + place
        yield start * row, start * row + length
