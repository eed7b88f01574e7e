"""Where tensors lie in files: plain data, so that anyone may read and write any part of them in any order.

`.safetensors` files are read and laid out here, `.pth` files in `pth`. Nothing here reads a tensor.
"""

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchacc.checkpoint.own_format.regular_files import open_regular, read_regular
from torchacc.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
_EAGER_BYTES = 1 << 20
"""What the disk is to begin with at once; smaller ones are left together."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class FileRegion(NamedTuple):
    """A tensor's place in a file: its elements in row-major order, little-endian."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """The first byte of the tensor, counted in the file."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return self.numel * self.dtype.itemsize


class SafetensorsLayout(NamedTuple):
    """A safetensors file that is yet to be made."""

    header: bytes
    """What it begins with."""
    regions: dict[str, FileRegion]
    """The tensors by name; the paths are bare file names."""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(region.nbytes for region in self.regions.values())


def plan_safetensors(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], stem: str, max_shard_size: int | None = None
) -> dict[str, SafetensorsLayout]:
    """Lay tensors out in safetensors files, without touching a disk: every process comes to the same.

    Args:
        tensors: Name to dtype and shape.
        stem: The file is `<stem>.safetensors`, or they are `<stem>-0000i-of-0000n.safetensors`.
        max_shard_size: Bytes of tensors in one file, exceeded only by a tensor that is larger; None for one file.

    Returns:
        File name to layout.

    Raises:
        CheckpointError: A dtype that safetensors does not have.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * dtype.itemsize
        if max_shard_size is not None and groups[-1] and filled + nbytes > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        file_names = [f"{stem}.safetensors"]
    else:
        file_names = [f"{stem}-{index:05}-of-{len(groups):05}.safetensors" for index in range(1, len(groups) + 1)]
    return {
        file_name: _lay_out(file_name, {name: tensors[name] for name in group})
        for file_name, group in zip(file_names, groups, strict=True)
    }


def safetensors_index(layouts: Mapping[str, SafetensorsLayout]) -> str:
    """Return what `<stem>.safetensors.index.json` says about files that belong together."""
    regions = {name: region for layout in layouts.values() for name, region in layout.regions.items()}
    index = {
        "metadata": {"total_size": sum(region.nbytes for region in regions.values())},
        "weight_map": {name: region.path.name for name, region in sorted(regions.items())},
    }
    return json.dumps(index, indent=2) + "\n"


def preallocate(path: Path, header: bytes, nbytes: int) -> None:
    """Make a file of a size that begins with a header; the rest is zeros until it is written, and takes no room."""
    with path.open("wb") as file:
        file.write(header)
        file.truncate(nbytes)


def read_header(path: Path) -> tuple[bytes | bytearray, int]:
    """Return what a safetensors file begins with, and the size of the file.

    Raises:
        CheckpointError: The file is missing, truncated, or not a safetensors file.
    """
    try:
        with open_regular(path) as file:
            file_size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            header_size = int.from_bytes(prefix, "little")
            if not 2 <= header_size <= min(_MAX_HEADER_BYTES, file_size - 8):
                raise CheckpointError(f"{path} is truncated, or not a safetensors file")
            return prefix + file.read(header_size), file_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def read_regions(
    path: Path, header_of: Callable[[Path], tuple[bytes | bytearray, int]] = read_header
) -> dict[str, FileRegion]:
    """Read where the tensors of a safetensors file lie, or of those that a `.index.json` names beside it.

    Args:
        path: The file.
        header_of: What reads a safetensors file's header.

    Raises:
        CheckpointError: A file is missing, truncated, or not a safetensors file; or the index names a file elsewhere,
            or a tensor that is not in its file.
    """
    if path.suffix != ".json":
        return _regions_in(path, *header_of(path))
    files: dict[str, dict[str, FileRegion]] = {}
    regions = {}
    for name, file_name in _weight_map(path).items():
        if file_name not in files:
            file = path.parent / file_name
            files[file_name] = _regions_in(file, *header_of(file))
        if name not in files[file_name]:
            raise CheckpointError(
                f"{path} says that {name} is in {file_name}, where it is not: copy both from one save"
            )
        regions[name] = files[file_name][name]
    return regions


def read_exactly(file: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill a buffer with a file's bytes from an offset on.

    Args:
        file: Descriptor to read from.
        buffer: What to fill, as bytes.
        offset: The first byte to read.
        path: Named in the error.

    Raises:
        CheckpointError: The file ends before the buffer is full.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], offset + done)
        if not count:
            raise CheckpointError(f"{path} ends within a tensor, at byte {offset + done}: it is truncated")
        done += count


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a host tensor, and of a copy of one that is not contiguous.

    Raises:
        TypeError: The tensor is not an ordinary one on the host.
    """
    plain = tensor.detach().contiguous().resolve_conj().resolve_neg()
    if not plain.is_cpu or (plain.nbytes and not plain.data_ptr()):
        raise TypeError(f"a tensor on the host is needed, and this one is {type(tensor).__name__} on {tensor.device}")
    flat = plain.as_strided((plain.numel(),), (1,))  # a single element may have any stride
    return flat.view(torch.uint8).numpy().data


def write_exactly(file: int, buffer: memoryview, offset: int) -> None:
    """Write all of a buffer, as bytes, into a file from an offset on, and let the disk begin with it."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(file, buffer[done:], offset + done)
    if len(buffer) >= _EAGER_BYTES:
        # Linux begins to write what it is told not to keep, and keeps what is not on the disk yet: mm/fadvise.c. The
        # disk would else be idle until the file is synced.
        os.posix_fadvise(file, offset, len(buffer), os.POSIX_FADV_DONTNEED)


def _lay_out(file_name: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> SafetensorsLayout:
    # Large elements first: the format allows no gaps, and so every tensor is aligned to its own elements.
    ordered = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins = {}
    position = 0
    for name, (dtype, shape) in ordered:
        if dtype not in _NAMES:
            raise CheckpointError(f"{name} is {dtype}, which a safetensors file cannot hold: write a .pth file")
        begins[name] = position
        position += prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begins[name], position]}
    packed = json.dumps(header, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)
    start = 8 + len(packed)
    path = Path(file_name)  # one for all, as it keeps its hash
    regions = {name: FileRegion(path, *tensors[name], start + begins[name]) for name in tensors}
    return SafetensorsLayout(len(packed).to_bytes(8, "little") + packed, regions)


def _regions_in(path: Path, header: bytes | bytearray, file_size: int) -> dict[str, FileRegion]:
    start = len(header)
    regions: dict[str, FileRegion] = {}
    spans: list[tuple[int, int, str]] = []
    try:
        for name, entry in _json(header[8:]).items():
            if name != "__metadata__":
                regions[name] = region = _region(path, entry, start)
                spans.append((region.offset, start + entry["data_offsets"][1], name))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged, or not a safetensors file: its header makes no sense") from None
    _check_spans(path, regions, spans, start, file_size)
    return regions


def _check_spans(
    path: Path, regions: Mapping[str, FileRegion], spans: list[tuple[int, int, str]], start: int, file_size: int
) -> None:
    """Refuse tensors of another size than their shape has, and what the format does not allow: gaps and overlaps."""
    for begin, stop, name in sorted(spans):
        if begin + regions[name].nbytes != stop:
            raise CheckpointError(f"{path} is damaged: the header gives {name} another size than its shape has")
        if stop > file_size:
            raise CheckpointError(f"{path} is truncated: {name} ends at byte {stop} of {file_size}")
        if begin != start:
            how = "overlaps another" if begin < start else "has a gap before it"
            raise CheckpointError(f"{path} is damaged: the tensor {name} {how}")
        start = stop
    if start != file_size:
        raise CheckpointError(f"{path} is damaged: {file_size - start} bytes follow the last tensor")


def _json(text: str | bytes | bytearray) -> Any:
    """Return what JSON says; of names that are there twice, one would be passed over."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name is there twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def _region(path: Path, entry: Mapping[str, Any], start: int) -> FileRegion:
    shape, offsets = entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets]
    if set(map(type, numbers)) != {int} or min(numbers) < 0:
        raise ValueError(entry)
    return FileRegion(path, DTYPES[entry["dtype"]], tuple(shape), start + offsets[0])


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = _json(read_regular(path, _MAX_HEADER_BYTES))["weight_map"]
        named = dict(weight_map.items())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged, or not an index of safetensors files") from None
    for name, file_name in named.items():
        if not isinstance(file_name, str) or file_name != Path(file_name).name or file_name in ("", ".", ".."):
            raise CheckpointError(f"{path} says that {name} is in {file_name!r}: only files in its own folder are read")
    return named
