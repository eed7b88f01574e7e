"""Tensors of files that are to be made: elements of other files, read in chunks when they are written."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from torchacc.checkpoint.own_format.regular_files import open_regular
from torchacc.checkpoint.own_format.safetensors_files import FileRegion, as_bytes, read_exactly
from torchacc.errors import CheckpointError

CHUNK_BYTES = 4 << 20


class Source(NamedTuple):
    """Consecutive elements of a tensor in a file."""

    region: FileRegion
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class NewTensor:
    """A tensor of a file that is to be made; where it stands twice, both share its room."""

    name: str
    """What it is called in messages."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[Source, ...] = ()
    """The elements that fill it one after another, cast to its dtype; what remains of it is zeros."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[memoryview]:
        """Yield its bytes; each chunk is valid until the next one is asked for.

        Raises:
            CheckpointError: A file ends before, or cannot be read.
        """
        left = self.nbytes
        for region, start, stop in self.sources:
            for raw in read_chunks(region, start, stop):
                data = raw
                if region.dtype != self.dtype:
                    data = as_bytes(torch.frombuffer(raw, dtype=region.dtype).to(self.dtype))
                left -= len(data)
                yield data
        while left:
            yield memoryview(bytes(min(left, CHUNK_BYTES)))
            left -= min(left, CHUNK_BYTES)

    def read(self) -> torch.Tensor:
        """Return it in memory."""
        full = torch.empty(self.shape, dtype=self.dtype)
        target, position = as_bytes(full), 0
        for data in self.chunks():
            target[position : position + len(data)] = data
            position += len(data)
        return full

    def origin(self) -> str:
        """Return where its elements come from: names of files, and the elements of their tensors."""
        found = ", ".join(f"{region.path.name}[{start}:{stop}]" for region, start, stop in self.sources)
        others = {region.dtype for region, _, _ in self.sources} - {self.dtype}
        return found + "".join(f", cast from {short(dtype)}" for dtype in others)


def read_chunks(region: FileRegion, start: int, stop: int) -> Iterator[memoryview]:
    """Yield the bytes of consecutive elements of a tensor; each chunk is valid until the next one is asked for.

    Raises:
        CheckpointError: The file ends before, or cannot be read.
    """
    begin, end = (region.offset + element * region.dtype.itemsize for element in (start, stop))
    buffer = memoryview(bytearray(min(CHUNK_BYTES, end - begin)))
    try:
        with open_regular(region.path) as file:
            for offset in range(begin, end, CHUNK_BYTES):
                data = buffer[: end - offset]
                read_exactly(file.fileno(), data, offset, region.path)
                yield data
    except OSError as error:
        raise CheckpointError(f"{region.path} cannot be read: {os.strerror(error.errno or 0)}") from None


def split(sources: Sequence[Source], sizes: Sequence[int]) -> Iterator[tuple[Source, ...]]:
    """Yield the sources of tensors of these numbers of elements, which follow one another; the last ones may lack some.

    Args:
        sources: All the elements.
        sizes: How many elements each tensor has.
    """
    left = list(reversed(sources))
    for size in sizes:
        own = []
        while size and left:
            region, start, stop = left.pop()
            if stop - start > size:
                left.append(Source(region, start + size, stop))
                stop = start + size
            if start < stop:
                own.append(Source(region, start, stop))
            size -= stop - start
        yield tuple(own)


def leaves(tree: Any, kind: type) -> Iterator[Any]:
    """Yield what is of a kind in dicts, lists and tuples, as often as it is there."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(value, kind)


def replace_leaves(tree: Any, kind: type, new: Any) -> Any:
    """Return dicts, lists and tuples with `new(leaf)` in the place of each leaf of a kind."""
    if isinstance(tree, kind):
        return new(tree)
    if isinstance(tree, Mapping):
        return {key: replace_leaves(value, kind, new) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(replace_leaves(value, kind, new) for value in tree)
    return tree


def short(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
