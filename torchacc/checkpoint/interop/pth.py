"""`.pth` files, as `torch.save` writes them: a zip file with a pickle and one uncompressed record for each storage.

PyTorch reads them; what it does not check is checked before: the checksums, and what a file says of its own size.
"""

import errno
import os
import pickletools
import re
import struct
import threading
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from mmap import MAP_SHARED
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple

import torch

from torchacc.checkpoint.format.regular_files import MAX_PICKLE_BYTES, check_tree, open_regular, size_of
from torchacc.checkpoint.format.safetensors_files import FileRegion, read_exactly
from torchacc.errors import CheckpointError

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class NewTensor:
    """A tensor that a file to be made has room for; where it stands twice, both share that room."""

    name: str
    """What it is called in messages."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.numel * self.dtype.itemsize


class Record(NamedTuple):
    """A storage in a file."""

    name: str
    start: int
    """Its first byte, counted in the file."""
    size: int
    crc: int
    """The checksum of its bytes, as the file has it."""

    @property
    def span(self) -> range:
        """Its bytes in the file."""
        return range(self.start, self.start + self.size)


def load_pth(path: Path, name: Path | None = None, *, mmap: bool = False) -> Any:
    """Load what `torch.save` wrote, on the CPU; no code is run.

    Args:
        path: The file.
        name: What it is called in errors, if not by its path.
        mmap: Map tensors instead of reading them, and compare no checksums but the pickle's.

    Raises:
        CheckpointError: The file is truncated, altered, or holds more than tensors and plain values.
    """
    return _load(path, name or path, mmap=mmap)[0]


def read_pth(path: Path) -> Any:
    """Read what `torch.save` wrote, with a `FileRegion` in the place of each tensor; no tensor is read.

    Raises:
        CheckpointError: As `load_pth()`; or a tensor is not a plain, contiguous one of the CPU.
    """
    tree, pickle_bytes = _load(path, path, mmap=True, may_share=True)
    check_tree(tree, pickle_bytes, path)
    tensors = {id(tensor): tensor for tensor in leaves(tree, torch.Tensor)}
    slots = _slots(path, tensors)
    return replace_leaves(tree, torch.Tensor, lambda tensor: slots[id(tensor)])


def _load(path: Path, name: Path, *, mmap: bool, may_share: bool = False) -> tuple[Any, int]:
    """Return what a file holds, and the size of its pickle; with `may_share` nothing is written into its tensors."""
    try:
        with open_regular(path) as file:
            pickle_bytes = verify_records(file, str(name), pickle_only=mmap)
            if mmap:
                return _mapped(path, may_share=may_share), pickle_bytes
            return torch.load(file, map_location="cpu", weights_only=True), pickle_bytes
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{name} cannot be read: No such file") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnpicklingError as error:
        raise _refused(name, str(error)) from None
    except Exception as error:  # what is no pickle fails in any way
        reason = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{name} is damaged: its pickle ends with {type(error).__name__}: {reason}") from None


def _mapped(path: Path, *, may_share: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if not may_share or os.strerror(errno.ENOMEM) not in str(error):
            raise
    # Linux maps a file that is larger than the memory only where it is shared, for which it must be writable.
    try:
        with torch.serialization.set_default_mmap_options(MAP_SHARED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} is larger than the memory, and can be mapped only by who may write to it: {error}"
        ) from None


def verify_records(file: IO[bytes], name: str, *, pickle_only: bool = False) -> int:
    """Compare what `torch.save` wrote with the checksums in it, which `torch.load` does not.

    Args:
        file: The file, or the part of one where it lies.
        name: What it is called in messages.
        pickle_only: Leave out the tensors.

    Returns:
        The size of its pickle.

    Raises:
        CheckpointError: It is truncated, altered, has no checksums, or would take more memory than it has bytes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            infos = _checked_records(archive, name, size_of(file))
            damaged = None if pickle_only else archive.testzip()
            if damaged is not None:
                raise CheckpointError(f"{name} is damaged: the checksum of its record {damaged} is another")
            pickled = archive.read(infos["data.pkl"])
            _check_pickle(pickled, name)
            if "byteorder" in infos and archive.read(infos["byteorder"]) != b"little":
                raise CheckpointError(f"{name} was written on a big-endian machine, which is not supported")
            return len(pickled)
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{name} cannot be read ({error}): it is truncated, damaged, or not a file of torch.save. What PyTorch "
            "before 1.6 wrote has no checksums: load it by torch.load(), and save it again"
        ) from None
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged directory fails in any way
        raise CheckpointError(f"{name} is damaged: {type(error).__name__}: {error}") from None
    finally:
        file.seek(0)


def tensor_records(path: Path) -> list[Record]:
    """Return the storages in a `.pth` file that are not empty, in the order of their bytes.

    Raises:
        CheckpointError: The file is not a complete zip file.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            infos = [info for info in archive.infolist() if _inner_name(info).startswith("data/") and info.file_size]
            return sorted((_record(file, path, info) for info in infos), key=lambda record: record.start)
    except CheckpointError:
        raise
    except (zipfile.BadZipFile, OSError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


class RecordReader:
    """Reads tensors from `.pth` files in chunks, and compares each record with its checksum the first time."""

    def __init__(self, names: Mapping[FileRegion, str]) -> None:
        """Prepare to read tensors.

        Args:
            names: What the tensors that may be read are called in messages.
        """
        self._names = names
        self._lock = threading.Lock()
        self._records: dict[Path, list[Record]] = {}
        self._verified: set[tuple[Path, int]] = set()

    def read(self, slot: FileRegion, nbytes: int) -> Iterator[memoryview]:
        """Yield the first bytes of a tensor in chunks, which are valid until the next one is asked for.

        What is yielded must not be used for good before the last one has been: a record that is read for the first time
        is read completely, and its checksum known at its end.

        Raises:
            CheckpointError: The file has changed, or the record is damaged.
        """
        if not nbytes:
            return
        record = self._record_of(slot)
        wanted = range(slot.offset, slot.offset + nbytes)
        is_new = (slot.path, record.start) not in self._verified
        buffer, crc = bytearray(CHUNK_BYTES), 0
        span = record.span if is_new else wanted
        try:
            with open_regular(slot.path) as file:
                for start in range(span.start, span.stop, CHUNK_BYTES):
                    data = memoryview(buffer)[: min(CHUNK_BYTES, span.stop - start)]
                    read_exactly(file.fileno(), data, start, slot.path)
                    crc = zlib.crc32(data, crc) if is_new else 0
                    first, last = max(wanted.start, start), min(wanted.stop, start + len(data))
                    if first < last:
                        yield data[first - start : last - start]
        except OSError as error:
            raise CheckpointError(f"{slot.path} cannot be read: {error.strerror}") from None
        if is_new and crc != record.crc:
            raise self.damaged(slot.path, record)
        self._verified.add((slot.path, record.start))

    def verify(self, path: Path) -> None:
        """Read a file completely, and compare all of it with the checksums.

        Raises:
            CheckpointError: It is damaged; the message names the record, and its tensors.
        """
        name = damaged_record(path)
        if name is not None:
            record = next((record for record in tensor_records(path) if record.name == name), None)
            raise self.damaged(path, record or Record(name, 0, 0, 0))  # of what is no tensor, only the name matters

    def damaged(self, path: Path, record: Record) -> CheckpointError:
        """Return the error of a record whose checksum is wrong."""
        names = {name for slot, name in self._names.items() if slot.path == path and slot.offset in record.span}
        holding = f", which holds {', '.join(sorted(names))}," if names else ""
        return CheckpointError(f"{path} is damaged: the checksum of its record {record.name}{holding} is wrong")

    def _record_of(self, slot: FileRegion) -> Record:
        with self._lock:
            if slot.path not in self._records:
                self._records[slot.path] = tensor_records(slot.path)
        records = self._records[slot.path]
        index = bisect_right(records, slot.offset, key=lambda record: record.start) - 1
        if index >= 0 and slot.offset + slot.nbytes <= records[index].span.stop:
            return records[index]
        raise CheckpointError(f"{slot.path} has been changed while it was read: a tensor is no longer there")


def damaged_record(path: Path) -> str | None:
    """Read a `.pth` file completely, and return the name of the first record whose checksum is wrong, or None.

    Raises:
        CheckpointError: The file is not a complete zip file.
    """
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            _checked_records(archive, str(path), size_of(file))
            return archive.testzip()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged directory fails in any way
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def create_pth(path: Path, contents: Any) -> dict[NewTensor, FileRegion]:
    """Make a file as `torch.save` does, with room for tensors that are yet to be written; it is sparse.

    Args:
        path: The file to make.
        contents: What to save: dicts, lists and tuples, with a `NewTensor` in the place of each tensor.

    Returns:
        Where to write each of them. What is not written is zeros.
    """
    # Memory that is never touched takes none; the same new tensor becomes the same tensor, which is saved once.
    tensors = {new: torch.empty(new.shape, dtype=new.dtype) for new in leaves(contents, NewTensor)}
    # Into a file object: given a path, torch.save writes its name into the file.
    with path.open("wb") as file, torch.serialization.skip_data():
        torch.save(replace_leaves(contents, NewTensor, tensors.__getitem__), file)
    # torch.save numbers storages as it comes across them; the empty ones have no bytes to write.
    starts = {record.name.rpartition("/")[2]: record.start for record in tensor_records(path)}
    return {
        new: FileRegion(path, new.dtype, new.shape, starts.get(str(number), 0)) for number, new in enumerate(tensors)
    }


def seal_pth(path: Path, checksums: Mapping[int, int]) -> None:
    """Enter the checksums of tensors that have been written into a file that `create_pth` made.

    Args:
        path: The file.
        checksums: The CRC-32 of each tensor, by its first byte in the file.
    """
    with path.open("r+b") as file:
        with zipfile.ZipFile(file) as archive:
            infos, entry = archive.infolist(), archive.start_dir
        for info in infos:
            record = _record(file, path, info)
            if record.size and _inner_name(info).startswith("data/"):
                packed = struct.pack("<I", checksums[record.start])
                # In the data descriptor (PK\x07\x08, checksum, sizes) and in the directory.
                for offset in (record.start + record.size + 4, entry + 16):
                    file.seek(offset)
                    file.write(packed)
            file.seek(entry + 28)
            entry += 46 + sum(struct.unpack("<HHH", file.read(6)))  # name, extra field, comment


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


def _slots(path: Path, tensors: Mapping[int, torch.Tensor]) -> dict[int, FileRegion]:
    """Return where tensors lie in the file that they are mapped from.

    Their storages are its records, and lie in memory as those do in the file.
    """
    for tensor in tensors.values():
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.device.type != "cpu":
            raise CheckpointError(f"{path} holds a tensor that is not a plain one of the CPU: save tensor.cpu()")
        if tensor.numel() and not tensor.is_contiguous():
            raise CheckpointError(
                f"{path} holds a tensor of shape {tuple(tensor.shape)} that is not contiguous: save its .contiguous()"
            )
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    mapped = sorted((start, storage.nbytes()) for start, storage in storages.items() if storage.nbytes())
    records = tensor_records(path)
    shift = mapped[0][0] - records[0].start if mapped and records else 0
    if mapped != [(record.start + shift, record.size) for record in records]:
        raise CheckpointError(
            f"{path} is damaged, or has tensors elsewhere than in dicts, lists and tuples: its tensors and its records "
            "do not fit each other. Save state_dict()s"
        )
    return {
        key: FileRegion(path, tensor.dtype, tuple(tensor.shape), tensor.data_ptr() - shift if tensor.numel() else 0)
        for key, tensor in tensors.items()
    }


def _checked_records(archive: zipfile.ZipFile, name: str, file_size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the records of a file by name, once their directory is such as `torch.save` writes it."""
    infos = archive.infolist()
    records = {_inner_name(info): info for info in infos}
    if "data.pkl" not in records:
        raise CheckpointError(f"{name} is a zip file, but not one that `torch.save` wrote")
    if len(records) < len(infos):
        raise CheckpointError(f"{name} is damaged: it has two records of one name")
    if not any(info.CRC for info in infos if info.file_size):
        raise CheckpointError(
            f"{name} has no checksums: save it again without torch.serialization.set_crc32_options(False)"
        )
    packed = [
        info.filename
        for info in infos
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size
    ]
    # PyTorch takes a record with this attribute for a folder, and leaves the memory for its bytes as it is.
    folders = [info.filename for info in infos if info.external_attr & _DOS_FOLDER and info.file_size]
    if packed or folders or sum(info.file_size for info in infos) > file_size:
        what = f"its record {packed[0]} is compressed" if packed else "its records are larger than it is"
        what = f"its record {folders[0]} is said to be a folder" if folders else what
        raise CheckpointError(f"{name} is not as `torch.save` writes it: {what}")
    if records["data.pkl"].file_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{name} is damaged: its pickle has {records['data.pkl'].file_size:,} bytes")
    return records


def _check_pickle(pickled: bytes, name: str) -> None:
    """Refuse what PyTorch would make as large as the pickle says, whatever the size of the file."""
    if b"bytearray" in pickled and any(
        opcode.name in _NAMES_CODE and str(value).endswith("bytearray")
        for opcode, value, _ in pickletools.genops(pickled)
    ):
        raise CheckpointError(f"{name} holds a bytearray, which may be of any size: save bytes")


_DOS_FOLDER = 0x10
_NAMES_CODE = {"GLOBAL", "STACK_GLOBAL", "INST", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
"""Opcodes that name what is called, or strings that another one takes as such a name."""


def _refused(name: Path, reason: str) -> CheckpointError:
    """Return the error of a pickle that PyTorch's unpickler did not take."""
    found = re.search(r"GLOBAL ([\w.]+)", reason)
    if found is None:
        lines = [line.strip() for line in reason.splitlines() if "Unsupported" in line] or reason.splitlines()
        return CheckpointError(f"{name} is damaged, or holds more than tensors and plain values: {lines[0][:200]}")
    return CheckpointError(
        f"{name} holds a {found[1][:200]}: it holds more than tensors and plain values, and reading it could run code. "
        "Save state_dict()s, tensors, numbers and strings"
    )


def _inner_name(info: zipfile.ZipInfo) -> str:
    return info.filename.partition("/")[2]  # below the folder that everything in the file is in


def _record(file: IO[bytes], path: Path, info: zipfile.ZipInfo) -> Record:
    """Return where the bytes of a record lie; the length of its header is known only from the header."""
    file.seek(info.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path} is damaged at byte {info.header_offset}: no record of `torch.save` begins there")
    start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
    return Record(info.filename, start, info.file_size, info.CRC)
