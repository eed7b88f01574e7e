"""`.pth` files, as `torch.save` writes them: a zip file with a pickle and one uncompressed record for each storage.

PyTorch reads them; what it does not check is checked before: the checksums, and what a file says of its own size.
"""

import errno
import io
import os
import re
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from mmap import MAP_SHARED
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any, NamedTuple

import torch
from typing_extensions import override

from torchacc.checkpoint.other_formats.new_tensors import CHUNK_BYTES, NewTensor, leaves, replace_leaves
from torchacc.checkpoint.other_formats.unpickling import MAX_PICKLE_BYTES, Unpickler, check_tree
from torchacc.checkpoint.own_format.regular_files import open_regular
from torchacc.checkpoint.own_format.safetensors_files import FileRegion
from torchacc.errors import CheckpointError

_DOS_FOLDER = 0x10
_END_BYTES = 98
"""What a zip file ends with: two records of the directory's place in 64 bits, and one in 32."""
_STORAGES = {
    1: ("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"),
    2: ("Half", "BFloat16", "Short"),
    4: ("Float", "Int", "QInt32"),
    8: ("Double", "Long", "ComplexFloat"),
    16: ("ComplexDouble",),
}
_ITEM_BYTES = {f"{kind}Storage": nbytes for nbytes, kinds in _STORAGES.items() for kind in kinds}
"""The types of storages that `torch.save` names -> bytes of an element."""


class Record(NamedTuple):
    """A storage in a file."""

    name: str
    start: int
    """Its first byte, counted in the file."""
    size: int

    @property
    def stop(self) -> int:
        """The byte behind its last one."""
        return self.start + self.size


def load_pth(path: Path, name: Path | None = None, *, mmap: bool = False) -> Any:
    """Load what `torch.save` wrote, on the CPU; no code is run.

    Args:
        path: The file.
        name: What it is called in errors, if not by its path.
        mmap: Map tensors instead of reading them, and compare no checksums but the pickle's.

    Raises:
        CheckpointError: The file is truncated, altered, or holds more than tensors and plain values.
    """
    with naming(name or path), open_regular(path) as file:
        _verify_records(file, str(name or path), pickle_only=mmap)
        return torch.load(path if mmap else file, map_location="cpu", weights_only=True, mmap=mmap)


def loads_pth(saved: bytes, name: str) -> Any:
    """Load what `torch.save` wrote, as `load_pth()` does, from memory; `name` is what errors call it."""
    with naming(name), io.BytesIO(saved) as file:
        _verify_records(file, name)
        return torch.load(file, map_location="cpu", weights_only=True)


def read_pth(path: Path) -> Any:
    """Read what `torch.save` wrote, with a `FileRegion` in the place of each tensor; no tensor is read.

    Raises:
        CheckpointError: As `load_pth()`; or a tensor is not a plain, contiguous one of the CPU.
    """
    with naming(path):
        with open_regular(path) as file:
            pickle_bytes = _verify_records(file, str(path), pickle_only=True)
        tree = _mapped(path)
    check_tree(tree, pickle_bytes, path)
    if _hides_tensor(tree):
        raise CheckpointError(f"{path} has a tensor in a set, or in a key of a dict: save it in a list")
    tensors = {id(tensor): tensor for tensor in leaves(tree, torch.Tensor)}
    regions = _regions(path, tensors)
    return replace_leaves(tree, torch.Tensor, lambda tensor: regions[id(tensor)])


def _verify_records(file: IO[bytes], name: str, *, pickle_only: bool = False) -> int:
    """Compare what `torch.save` wrote with the checksums and sizes in it, which `torch.load` does not.

    Args:
        file: The file, or the part of one where it lies.
        name: What it is called in messages.
        pickle_only: Leave out the bytes of the tensors.

    Returns:
        The size of its pickle.

    Raises:
        CheckpointError: It is truncated, altered, has no checksums, or would take more memory than it has bytes.
    """
    with _archive(file, name) as (archive, infos):
        if not pickle_only:
            _compare(archive, archive.infolist(), name, {})
        pickled = archive.read(infos["data.pkl"])
        _Sizes(pickled, infos, name).load()
        if "byteorder" in infos and archive.read(infos["byteorder"]) != b"little":
            raise CheckpointError(f"{name} was written on a big-endian machine, which is not supported")
    file.seek(0)
    return len(pickled)


def verify_regions(path: Path, regions: Iterable[tuple[FileRegion, str]], *, everything: bool) -> None:
    """Compare the records of a file that tensors are read from with their checksums.

    Args:
        path: The file.
        regions: The tensors, and what each is called in messages.
        everything: Compare all other records as well.

    Raises:
        CheckpointError: One is damaged: the message names it, and its tensors; or the file has changed since it was
            planned to read the tensors.
    """
    with naming(path), open_regular(path) as file, _archive(file, str(path)) as (archive, infos):
        records = _storages(file, path, infos.values())
        holding: dict[str, set[str]] = {}
        for region, name in regions:
            if region.nbytes:
                index = bisect_right(records, region.offset, key=lambda record: record.start) - 1
                if index < 0 or region.offset + region.nbytes > records[index].stop:
                    raise CheckpointError(f"{path} has been changed while it was read: a tensor is no longer there")
                holding.setdefault(records[index].name, set()).add(name)
        wanted = [info for info in archive.infolist() if everything or info.filename in holding]
        _compare(archive, wanted, str(path), holding)


def tensor_records(path: Path) -> list[Record]:
    """Return the storages in a `.pth` file that are not empty, in the order of their bytes.

    Raises:
        CheckpointError: The file is not a complete zip file.
    """
    with naming(path), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        return _storages(file, path, archive.infolist())


def create_pth(path: Path, contents: Any) -> dict[NewTensor, FileRegion]:
    """Make a file as `torch.save` does, with room for tensors that are yet to be written; it is sparse.

    Args:
        path: The file to make.
        contents: What to save: dicts, lists and tuples, with a `NewTensor` in the place of each tensor.

    Returns:
        Where to write each of them.
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
        starts = {record.name: record for record in _storages(file, path, infos)}
        for info in infos:
            if (record := starts.get(info.filename)) is not None:
                packed = struct.pack("<I", checksums[record.start])
                # In the data descriptor (PK\x07\x08, checksum, sizes) and in the directory.
                for offset in (record.stop + 4, entry + 16):
                    file.seek(offset)
                    file.write(packed)
            file.seek(entry + 28)
            entry += 46 + sum(struct.unpack("<HHH", file.read(6)))  # name, extra field, comment


class _Sizes(Unpickler):
    """Goes through a pickle without making anything, and compares the size of each storage with its record's.

    PyTorch takes the size that the pickle says, and reads memory beyond a record that is smaller.
    """

    def __init__(self, pickled: bytes, infos: Mapping[str, zipfile.ZipInfo], name: str) -> None:
        super().__init__(pickled)
        self._infos, self._name = infos, name

    @override
    def find_class(self, module: str, name: str) -> Any:
        if name == "bytearray":  # which PyTorch would make as large as the pickle says
            raise CheckpointError(f"{self._name} holds a bytearray, which may be of any size: save bytes")
        return name if name in _ITEM_BYTES else _PickledObject

    @override
    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, numel = pid
        record = self._infos.get(f"data/{key}")
        if record is None or type(numel) is not int or numel * _ITEM_BYTES[kind] != record.file_size:
            raise CheckpointError(
                f"{self._name} is damaged: its pickle says that the record data/{key} is a {kind} of {numel} elements, "
                f"and it has {record.file_size if record else 0:,} bytes"
            )
        return _PickledObject()


class _PickledObject:
    """Stands for any object of a pickle."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    append = extend = add = update = __setstate__


def _mapped(path: Path) -> Any:
    """Return what a file holds with its tensors mapped, which must not be written into."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if os.strerror(errno.ENOMEM) not in str(error):
            raise
    # Linux maps a file that is larger than the memory only where it is shared, for which it must be writable.
    with torch.serialization.set_default_mmap_options(MAP_SHARED):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _hides_tensor(tree: Any, *, hidden: bool = False) -> bool:
    """Return whether there is a tensor where `leaves()` does not go."""
    if isinstance(tree, torch.Tensor):
        return hidden
    if isinstance(tree, Mapping):
        return any(_hides_tensor(key, hidden=True) or _hides_tensor(tree[key], hidden=hidden) for key in tree)
    hidden |= type(tree) not in (list, tuple)
    return isinstance(tree, (list, tuple, set, frozenset)) and any(_hides_tensor(item, hidden=hidden) for item in tree)


def _regions(path: Path, tensors: Mapping[int, torch.Tensor]) -> dict[int, FileRegion]:
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


@contextmanager
def naming(name: Path | str) -> Iterator[None]:
    """Say of errors of a file, or of a part of one, which it is, in a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{name} cannot be read: No such file") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}") from None
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{name} cannot be read ({error}): it is truncated, damaged, or not a file of torch.save. What PyTorch "
            "before 1.6 wrote has no checksums: load it by torch.load(), and save it again"
        ) from None
    except UnpicklingError as error:
        raise _refused(name, str(error)) from None
    except Exception as error:  # a damaged directory or pickle fails in any way
        reason = str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{name} is damaged: {type(error).__name__}: {reason}") from None


@contextmanager
def _archive(file: IO[bytes], name: str) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Yield a zip file and its records by name, once its directory is such as `torch.save` writes it."""
    with zipfile.ZipFile(file) as archive:
        _check_directory(file, archive.start_dir, name)
        yield archive, _checked_records(archive, name, _size_of(file))


def _compare(
    archive: zipfile.ZipFile, infos: Iterable[zipfile.ZipInfo], name: str, holding: Mapping[str, set[str]]
) -> None:
    """Read records, and compare their checksums.

    Args:
        archive: The file.
        infos: The records.
        name: What the file is called in messages.
        holding: What the tensors in a record are called, by its name.
    """
    for info in infos:
        try:
            with archive.open(info) as record:
                while record.read(CHUNK_BYTES):
                    pass
        except zipfile.BadZipFile:
            tensors = ", ".join(sorted(holding.get(info.filename, ())))
            which = f"{info.filename}, which holds {tensors}," if tensors else info.filename
            raise CheckpointError(f"{name} is damaged: the checksum of its record {which} is wrong") from None


def _check_directory(file: IO[bytes], start: int, name: str) -> None:
    """Refuse a file whose directory PyTorch would look for elsewhere than where Python has found it.

    Python takes what lies before the end's record, PyTorch what lies at the offset that is noted there.
    """
    size = _size_of(file)
    file.seek(max(0, size - _END_BYTES))
    tail = file.read(_END_BYTES).rjust(_END_BYTES, b"\0")
    record, locator, end = tail[:56], tail[56:76], tail[76:]  # the first two are there where sizes have 64 bits
    noted = struct.unpack("<I", end[16:20])[0]
    is_plain = end[:4] == b"PK\x05\x06" and end[20:] == bytes(2)
    if locator[:4] == b"PK\x06\x07":
        noted = struct.unpack("<Q", record[48:])[0]
        is_plain &= record[:4] == b"PK\x06\x06" and locator[8:16] == struct.pack("<Q", size - _END_BYTES)
    if not is_plain or noted != start:
        raise CheckpointError(f"{name} is not as `torch.save` writes it: its directory is not where it says")


def _checked_records(archive: zipfile.ZipFile, name: str, file_size: int) -> dict[str, zipfile.ZipInfo]:
    """Return the records of a file by name, once their directory is such as `torch.save` writes it."""
    infos = archive.infolist()
    records = {_inner_name(info): info for info in infos}
    if "data.pkl" not in records:
        raise CheckpointError(f"{name} is a zip file, but not one that `torch.save` wrote")
    if len({record.lower() for record in records}) < len(infos):  # PyTorch takes capital letters for small ones
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


def _refused(name: Path | str, reason: str) -> CheckpointError:
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


def _storages(file: IO[bytes], path: Path, infos: Iterable[zipfile.ZipInfo]) -> list[Record]:
    """Return the storages that are not empty; where one begins is known only from its header."""
    found = []
    for info in infos:
        if _inner_name(info).startswith("data/") and info.file_size:
            file.seek(info.header_offset)
            header = file.read(30)
            if len(header) < 30 or header[:4] != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(
                    f"{path} is damaged at byte {info.header_offset}: no record of `torch.save` begins there"
                )
            start = info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30]))
            found.append(Record(info.filename, start, info.file_size))
    return sorted(found, key=lambda record: record.start)


def _size_of(file: IO[bytes]) -> int:
    """Return how many bytes a file, or a part of one, has."""
    before = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(before)
    return size
