"""`.pth` files, as `torch.save` writes them: a zip file with a pickle and one uncompressed record for each storage."""

import pickletools
import struct
import zipfile
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from typing_extensions import override

from torchacc.checkpoint.crc import Crc
from torchacc.checkpoint.format.regular_files import MAX_PICKLE_BYTES, Unpickler, check_tree, open_regular, size_of
from torchacc.checkpoint.format.safetensors_files import Slot
from torchacc.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class Blank:
    """A tensor that a file to be made has room for; where it stands twice, both share that room."""

    name: str
    """What it is called in messages."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.shape) * self.dtype.itemsize


class Written(NamedTuple):
    """A run of bytes that has been written to a file, or read from one."""

    offset: int
    crc: Crc


class Record(NamedTuple):
    """A storage in a file."""

    name: str
    start: int
    """Its first byte, counted in the file."""
    size: int
    crc: int
    """The checksum of its bytes, as the file has it."""


def read_pth(path: Path) -> Any:
    """Read what `torch.save` wrote, with a `Slot` in the place of each tensor.

    No tensor is read and no code is run: the pickle may name tensors, plain containers and dtypes, and nothing else
    (less than `torch.load(weights_only=True)` takes).

    Raises:
        CheckpointError: The file is truncated, altered where that shows, not a `.pth` file, or names anything else.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            records = _checked_records(archive, path, size_of(file))
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise CheckpointError(f"{path} was written on a big-endian machine, which is not supported")
            pickled = archive.read(records["data.pkl"])  # all of it, which compares its checksum
            found = _Unpickler(pickled, path, lambda key: _span(file, path, records[f"data/{key}"])).load()
            check_tree(found, len(pickled), path)
            return found
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): it is truncated, damaged, or not a file that `torch.save` wrote. "
            f"{_LEGACY}"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        raise CheckpointError(f"{path} is damaged: its pickle ends with {type(error).__name__}: {error}") from None


def verify_records(file: IO[bytes], name: str) -> None:
    """Read what `torch.save` wrote completely, and compare it with the checksums in it, which `torch.load` does not.

    Args:
        file: The file, or the part of one where it lies.
        name: What it is called in messages.

    Raises:
        CheckpointError: It is truncated, altered, has no checksums, or would take more memory than it has bytes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = _checked_records(archive, name, size_of(file))
            damaged = archive.testzip()
            if damaged is not None:
                raise CheckpointError(f"{name} is damaged: the checksum of its record {damaged} is another")
            pickled = archive.read(records["data.pkl"])
            if b"bytearray" in pickled and any(
                opcode.name in _NAMES_CODE and str(value).endswith("bytearray")
                for opcode, value, _ in pickletools.genops(pickled)
            ):
                raise CheckpointError(f"{name} holds a bytearray, which may be of any size: save bytes")
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{name} cannot be read, it is truncated, damaged, or not a file of torch.save ({error}). {_LEGACY}"
        ) from None
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged directory fails in any way
        raise CheckpointError(f"{name} is damaged: {type(error).__name__}: {error}") from None
    finally:
        file.seek(0)


def _checked_records(archive: zipfile.ZipFile, path: Path | str, file_size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the records of a file by name, once their directory is such as `torch.save` writes it."""
    infos = archive.infolist()
    records = {_record(info): info for info in infos}
    if "data.pkl" not in records:
        raise CheckpointError(f"{path} is a zip file, but not one that `torch.save` wrote")
    if len(records) < len(infos):
        raise CheckpointError(f"{path} is damaged: it has two records of one name")
    if not any(info.CRC for info in infos if info.file_size):
        raise CheckpointError(
            f"{path} has no checksums: save it again without torch.serialization.set_crc32_options(False)"
        )
    packed = [info.filename for info in infos if info.compress_type != zipfile.ZIP_STORED]
    if packed or sum(info.file_size for info in infos) > file_size:
        what = f"its record {packed[0]} is compressed" if packed else "its records are larger than it is"
        raise CheckpointError(f"{path} is not as `torch.save` writes it: {what}")
    if records["data.pkl"].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path} is damaged: its pickle has {records['data.pkl'].file_size:,} bytes")
    return records


def blanks_in(contents: Any) -> list[Blank]:
    """Return the blanks in dicts, lists and tuples, each once."""
    return list(dict.fromkeys(_leaves(contents, Blank)))


def create_pth(path: Path, contents: Any) -> dict[Blank, Slot]:
    """Make a file as `torch.save` does, with room for tensors that are yet to be written; it is sparse.

    Args:
        path: The file to make.
        contents: What to save: dicts, lists and tuples, with a `Blank` in the place of each tensor.

    Returns:
        Where to write each of them. What is not written is zeros.
    """
    # Memory that is never touched takes none; the same blank becomes the same tensor, which is saved once.
    tensors = {blank: torch.empty(blank.shape, dtype=blank.dtype) for blank in blanks_in(contents)}
    # Into a file object: given a path, torch.save writes its name into the file.
    with path.open("wb") as file, torch.serialization.skip_data():
        torch.save(_replace(contents, tensors), file)
    return dict(zip(_leaves(contents, Blank), _leaves(read_pth(path), Slot), strict=True))


def seal_pth(path: Path, written: Iterable[Written]) -> None:
    """Enter the checksums of the tensors' bytes into a file that `create_pth` made.

    Args:
        path: The file.
        written: The runs of bytes that were written to it, in any order and without overlap; the rest is zeros.
    """
    runs = sorted(written, key=lambda run: run.offset)
    with path.open("r+b") as file:
        with zipfile.ZipFile(file) as archive:
            infos, entry = archive.infolist(), archive.start_dir
        for info in infos:
            start, size = _span(file, path, info)
            if _record(info).startswith("data/"):
                packed = struct.pack("<I", joined_checksum(runs, start, start + size))
                _patch(file, start + size + 4, packed)  # the data descriptor: PK\x07\x08, checksum, sizes
                _patch(file, entry + 16, packed)
            file.seek(entry + 28)
            entry += 46 + sum(struct.unpack("<HHH", file.read(6)))  # name, extra field, comment


def tensor_records(path: Path) -> list[Record]:
    """Return the storages in a `.pth` file, in the order of their bytes.

    Raises:
        CheckpointError: The file is not a whole zip file.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if _record(info).startswith("data/")]
            return sorted(
                (Record(info.filename, *_span(file, path, info), info.CRC) for info in infos),
                key=lambda record: record.start,
            )
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def joined_checksum(runs: Sequence[Written], start: int, stop: int) -> int:
    """Return the checksum of a part of a file, zeros but for these runs, which are in order and do not overlap."""
    first, last = (bisect_left(runs, bound, key=lambda run: run.offset) for bound in (start, stop))
    crc = Crc()
    for run in runs[first:last]:
        crc = crc.zeros(run.offset - start - crc.size).then(run.crc)
    return crc.zeros(stop - start - crc.size).value


def damaged_record(path: Path) -> tuple[str, range] | None:
    """Read a `.pth` file completely and return the first record whose checksum is wrong, and its bytes; or None.

    Raises:
        CheckpointError: The file is not a whole zip file.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            _checked_records(archive, path, size_of(file))
            name = archive.testzip()
            if name is None:
                return None
            start, size = _span(file, path, archive.getinfo(name))
            return name, range(start, start + size)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged directory fails in any way
        raise CheckpointError(f"{path} cannot be read: {error}") from None


class _Span(NamedTuple):
    """A run of bytes of a file."""

    start: int
    size: int


class _Storage(NamedTuple):
    """What the pickle calls a storage."""

    path: Path
    dtype: torch.dtype
    span: _Span


class _Unpickler(Unpickler):
    """Reads a pickle of `torch.save`, and refuses to look up anything that could be code."""

    def __init__(self, pickled: bytes, path: Path, span_of: Callable[[str], _Span]) -> None:
        super().__init__(pickled, encoding="utf-8")
        self._path, self._span_of = path, span_of

    @override
    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get(f"{module}.{name}")
        if found is None and module == "torch":
            dtype = getattr(torch, name, None)
            found = dtype if isinstance(dtype, torch.dtype) else None
        if found is None and name.startswith("_rebuild"):
            raise CheckpointError(
                f"{self._path} holds a tensor that is not a plain one of the CPU ({module}.{name}): save tensor.cpu()"
            )
        if found is None:
            raise CheckpointError(
                f"{self._path} holds a {module}.{name}, neither a tensor nor a plain value: reading it could run code. "
                "Save state_dict()s, numbers and strings only"
            )
        return found

    @override
    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, _, _ = pid
        return _Storage(self._path, dtype, self._span_of(key))


def _tensor(storage: _Storage, offset: int, size: Iterable[int], stride: Iterable[int], *_: Any) -> Slot:
    return _slot(storage, storage.dtype, offset, tuple(size), tuple(stride))


def _tensor_of_new_dtype(
    storage: _Storage,
    offset: int,
    size: Iterable[int],
    stride: Iterable[int],
    _grad: bool,
    _hooks: Any,
    dtype: torch.dtype,
    *_: Any,
) -> Slot:
    return _slot(storage, dtype, offset, tuple(size), tuple(stride))


def _parameter(data: Slot, *_: Any) -> Slot:
    return data


def _slot(storage: _Storage, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Slot:
    start, capacity = storage.span
    slot = Slot(storage.path, dtype, size, start + offset * dtype.itemsize)
    if slot.numel and not _row_major(size, stride):
        raise CheckpointError(
            f"{storage.path} holds a tensor of shape {size} that is not contiguous: save its .contiguous()"
        )
    if slot.offset < start or slot.offset + slot.nbytes > start + capacity:
        raise CheckpointError(f"{storage.path} is damaged: a tensor of shape {size} is larger than its record")
    return slot


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


_LEGACY = "What PyTorch before 1.6 wrote has no checksums: load it by torch.load(), and save it again"
_NAMES_CODE = {"GLOBAL", "STACK_GLOBAL", "INST", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
"""Opcodes that name what is called, or strings that another one takes as such a name."""
_STORAGE_DTYPES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "__builtin__.set": set,  # as it is called in the protocol that torch.save uses
    "_codecs.encode": _encoded,  # bytes, in that protocol
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_new_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.storage.UntypedStorage": torch.uint8,
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGE_DTYPES.items()},
}


def _row_major(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def _record(info: zipfile.ZipInfo) -> str:
    return info.filename.partition("/")[2]  # below the folder that everything in the file is in


def _span(file: IO[bytes], path: Path, info: zipfile.ZipInfo) -> _Span:
    """Return where the bytes of a record lie; the length of its header is known only from the header."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path} is damaged at byte {info.header_offset}: no record of `torch.save` begins there")
    return _Span(info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30])), info.file_size)


def _patch(file: IO[bytes], offset: int, packed: bytes) -> None:
    file.seek(offset)
    file.write(packed)


def _leaves(tree: Any, kind: type) -> Iterator[Any]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value, kind)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _leaves(value, kind)


def _replace(tree: Any, tensors: Mapping[Blank, torch.Tensor]) -> Any:
    if isinstance(tree, Blank):
        return tensors[tree]
    if isinstance(tree, Mapping):
        return {key: _replace(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return type(tree)(_replace(value, tensors) for value in tree)
    return tree
