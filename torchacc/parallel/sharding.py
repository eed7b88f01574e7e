"""Where the elements of a whole tensor lie: runs of consecutive ones, in row-major order. Plain integers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class TensorSlice:
    """A run of consecutive elements of a whole tensor, and where a holder has it."""

    name: str
    """The whole tensor's original name."""
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    start: int
    """The first element of the run, counted in the flattened whole tensor."""
    stop: int
    """The first element after it; equal to `start` where the run is empty."""
    offset: int = 0
    """Where the run begins in the holder's flattened tensor."""

    @property
    def numel(self) -> int:
        """Number of elements of the run."""
        return self.stop - self.start

    def part(self, index: int, count: int) -> "TensorSlice":
        """Return the run that one of `count` equal sharers has of this one, the last ones possibly less."""
        if count == 1:
            return self
        each = -(-self.numel // count)
        first, last = (min(each * i, self.numel) for i in (index, index + 1))
        return replace(self, start=self.start + first, stop=self.start + last, offset=self.offset + first)


@dataclass(frozen=True)
class TensorParallelSlice:
    """One of the equal parts into which a whole tensor is cut along a dimension, before the part is sharded."""

    dim: int
    index: int
    count: int


@dataclass(frozen=True)
class LocalShard:
    """What one process holds of a parameter that an optimizer sees: a shard of one tensor, or of several flattened."""

    key: str
    """The parameter's name in the process's own `state_dict()`; a flat one has a name of its own."""
    members: tuple[tuple[str, tuple[int, ...]], ...]
    """Original names and shapes of the whole tensors, which lie one after another."""
    shard_numel: int
    """Elements of each shard, padding included; those of the last ones may be left out."""
    index: int
    """Which of the shards it is."""
    cut: TensorParallelSlice | None = None
    """Of which part of the one tensor it is a shard; None where that is not cut."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensors."""
        return sum(prod(shape) for _, shape in self.members)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Original names of the whole tensors."""
        return tuple(name for name, _ in self.members)

    @cached_property
    def slices(self) -> tuple[TensorSlice, ...]:
        """What the shard has of each whole tensor; of some it may have nothing."""
        names, shapes = zip(*self.members, strict=True)
        start = self.index * self.shard_numel
        if self.cut is not None:
            return tuple(_runs_of_part(names[0], shapes[0], self.cut, start, start + self.shard_numel))
        return flat_slices(names, shapes, start, start + self.shard_numel)


def _runs_of_part(
    name: str, shape: tuple[int, ...], cut: TensorParallelSlice, start: int, stop: int
) -> Iterator[TensorSlice]:
    """Yield the runs of a whole tensor that are the elements from `start` to `stop` of a part of it, flattened."""
    row = prod(shape[cut.dim :]) // cut.count  # as long as this, elements of the part are neighbours in the whole
    stop = min(stop, prod(shape) // cut.count)
    position = start
    while position < stop:
        index, within = divmod(position, row)
        end = min(stop, (index + 1) * row)
        first = (index * cut.count + cut.index) * row + within
        yield TensorSlice(name, shape, first, first + end - position, offset=position - start)
        position = end


def flat_slices(
    names: Iterable[str], shapes: Iterable[Iterable[int]], start: int, stop: int
) -> tuple[TensorSlice, ...]:
    """Return what a run of several tensors, flattened one after another, has of each; empty pieces are left out."""
    pieces: list[TensorSlice] = []
    begin = 0
    for name, shape in zip(names, map(tuple, shapes), strict=True):
        end = begin + prod(shape)
        first, last = max(start, begin), min(stop, end)
        if first < last:
            pieces.append(TensorSlice(name, shape, first - begin, last - begin, offset=first - start))
        begin = end
    return tuple(pieces)
