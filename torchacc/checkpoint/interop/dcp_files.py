"""The files of `torch.distributed.checkpoint`, read and written without a process group, and without trusting them.

A folder holds `.metadata`, a pickle that says which entries there are and where they lie, and `.distcp` files. A tensor
lies there as the boxes that it was cut into, each as `torch.save` wrote it; anything else lies there as one such piece.
"""

import gc
import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, NamedTuple

import torch
from typing_extensions import Buffer, override

from torchacc.checkpoint.format.manifest import sync_folder
from torchacc.checkpoint.format.regular_files import MAX_PICKLE_BYTES, Unpickler, open_regular, read_regular
from torchacc.checkpoint.interop.pth import verify_records
from torchacc.errors import CheckpointError

METADATA = ".metadata"
_FILE = "__0_0.distcp"
FILES = (_FILE, METADATA)
"""The files that a `DcpWriter` makes."""
_VERSION = "1.0.0"
_GARBAGE_BYTES = 64 << 20
"""How much of what was written may be left in memory."""


class Piece(NamedTuple):
    """Where something that `torch.save` wrote lies."""

    path: Path
    start: int
    """The first byte, counted in the file."""
    nbytes: int


@dataclass(frozen=True)
class Box:
    """A part of a tensor."""

    offsets: tuple[int, ...]
    """Where it begins in the tensor, along each dim."""
    sizes: tuple[int, ...]
    piece: Piece | None
    """None for a box without elements, which need not be stored."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """In the order of their offsets; they cover the tensor."""

    @property
    def is_in_rows(self) -> bool:
        """Return whether every box is a run of elements: cut along the first dim alone."""
        return all(box.sizes[1:] == self.shape[1:] for box in self.boxes)


class DcpFolder:
    """A folder to read."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            CheckpointError: It is missing, damaged, or holds anything but metadata; or a file is missing or truncated.
        """
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        """The tensors by key."""
        self.values: dict[str, Piece] = {}
        """Where other entries lie, by key."""
        metadata = _read_metadata(path)
        try:
            self.key_paths: Mapping[str, tuple[Any, ...]] = _key_paths(metadata.planner_data)
            """The keys of the nested dicts that each key was made of; empty where they were not nested."""
            for key in self._in_order(metadata.state_dict_metadata):
                self._add(key, metadata)
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path / METADATA} is damaged, or of a layout that is not known: {type(error).__name__}: {error}"
            ) from None

    def runs(self, key: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor in runs: the first element of each, and its elements, flat and contiguous.

        No more than a box is held at once, or the tensor where it is cut along other dims than the first.
        """
        stored = self.tensors[key]
        if stored.is_in_rows:
            for box in stored.boxes:
                if box.numel:
                    first = box.offsets[0] if box.offsets else 0
                    yield first * prod(stored.shape[1:]), self._load_box(key, stored, box).reshape(-1)
            return
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        for box in stored.boxes:
            if box.numel:
                part = tuple(slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True))
                whole[part] = self._load_box(key, stored, box)
        yield 0, whole.reshape(-1)

    def read(self, key: str) -> torch.Tensor:
        """Return a whole tensor."""
        stored = self.tensors[key]
        whole = torch.empty(prod(stored.shape), dtype=stored.dtype)
        for start, run in self.runs(key):
            whole[start : start + run.numel()] = run
        return whole.view(stored.shape)

    def value(self, key: str) -> Any:
        """Return an entry that is no tensor: numbers, strings, and containers of them."""
        return _load(self.values[key], key)

    def _load_box(self, key: str, stored: StoredTensor, box: Box) -> torch.Tensor:
        assert box.piece is not None
        tensor = _load(box.piece, key)
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (stored.dtype, box.sizes):
            raise CheckpointError(
                f"{box.piece.path}: what lies at byte {box.piece.start} is not {key} as {self.path / METADATA} has it, "
                f"{stored.dtype} of shape {box.sizes}: the files are of different saves"
            )
        return tensor

    def _in_order(self, keys: Iterable[str]) -> list[str]:
        """Return keys as they were in the state that was saved; ranks share the writing in any order."""
        order = {key: index for index, key in enumerate(self.key_paths)}
        return sorted(keys, key=lambda key: order.get(key, len(order)))

    def _add(self, key: str, metadata: Any) -> None:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

        entry = metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            self.values[key] = self._piece(key, metadata.storage_data[MetadataIndex(key)])
            return
        boxes = []
        for chunk in entry.chunks:
            info = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
            piece = None if info is None else self._piece(key, info)
            boxes.append(Box(tuple(chunk.offsets), tuple(chunk.sizes), piece))
            if piece is None and boxes[-1].numel:
                raise CheckpointError(f"{self.path / METADATA} does not say where {key} lies")
        boxes.sort(key=lambda box: box.offsets)
        self.tensors[key] = StoredTensor(entry.properties.dtype, tuple(entry.size), tuple(boxes))
        _check_cover(self.path / METADATA, key, self.tensors[key])

    def _piece(self, key: str, info: Any) -> Piece:
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self.path / info.relative_path}: {key} went through {', '.join(info.transform_descriptors)} when it "
                "was saved, which is not supported: load it and save it without extensions"
            )
        relative = PurePosixPath(info.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise CheckpointError(
                f"{self.path / METADATA} says that {key} is in {str(relative)!r}: outside of the folder"
            )
        path = self.path / relative
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}, which holds {key}, cannot be read: {error.strerror}") from None
        if min(info.offset, info.length) < 0 or info.offset + info.length > size:
            raise CheckpointError(f"{path} is truncated: {key} ends at byte {info.offset + info.length} of {size}")
        return Piece(path, info.offset, info.length)


class DcpWriter:
    """Writes a folder; it is one only when `finish()` has returned."""

    def __init__(self, folder: Path) -> None:
        """Begin in an empty folder."""
        self._folder = folder
        self._file = (folder / _FILE).open("wb")
        self._entries: dict[str, Any] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._storage: dict[Any, Any] = {}
        self._garbage = 0

    def add_tensor(
        self,
        paths: Sequence[tuple[Any, ...]],
        dtype: torch.dtype,
        shape: tuple[int, ...],
        boxes: Iterable[tuple[tuple[int, ...], torch.Tensor]],
    ) -> None:
        """Write a tensor.

        Args:
            paths: The keys of nested dicts under which it is found: one, or several for the same bytes.
            dtype: The tensor's.
            shape: ″
            boxes: The offsets of each part, and the part, contiguous.
        """
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
            TensorStorageMetadata,
        )

        chunks = []
        keys = [self._note(path) for path in paths]
        for offsets, part in boxes:
            info = self._write(part)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
            self._storage |= {MetadataIndex(key, offsets): info for key in keys}
        for key in keys:
            self._entries[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)

    def add_value(self, paths: Sequence[tuple[Any, ...]], value: Any) -> None:
        """Write anything else."""
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

        info = self._write(value)
        for path in paths:
            key = self._note(path)
            self._entries[key] = BytesStorageMetadata()
            self._storage[MetadataIndex(key)] = info

    def finish(self) -> None:
        """Write the metadata, and let everything reach the disk."""
        from torch.distributed.checkpoint.metadata import Metadata

        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        metadata = Metadata(self._entries, self._paths, self._storage, version=_VERSION)
        with (self._folder / METADATA).open("wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _note(self, path: tuple[Any, ...]) -> str:
        key = ".".join(map(str, path))
        self._paths[key] = path
        return key

    def _write(self, content: Any) -> Any:
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        start = self._file.tell()
        torch.save(content, self._file)
        nbytes = self._file.tell() - start
        self._garbage += nbytes
        if self._garbage > _GARBAGE_BYTES:  # torch.save() leaves what it saved in a cycle of references
            gc.collect()
            self._garbage = 0
        return _StorageInfo(_FILE, start, nbytes)


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._position = file, start, nbytes, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = max(0, origin + offset)
        return self._position

    @override
    def tell(self) -> int:
        return self._position

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        wanted = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._position)]
        count = os.preadv(self._file.fileno(), [wanted], self._start + self._position)
        self._position += count
        return count


class _Unpickler(Unpickler):
    """Reads metadata, and refuses to look up anything that could be code."""

    def __init__(self, pickled: bytes, path: Path) -> None:
        super().__init__(pickled)
        self._path, self._known = path, _known_classes()

    @override
    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get(f"{module}.{name}")
        if found is None and module == "torch":
            dtype = getattr(torch, name, None)
            found = dtype if isinstance(dtype, torch.dtype) else None
        if found is None:
            raise CheckpointError(
                f"{self._path} holds a {module}.{name}, which is no metadata of torch.distributed.checkpoint: reading "
                "it could run code"
            )
        return found


def _known_classes() -> dict[str, Any]:
    from torch.distributed._shard.sharded_tensor import metadata as sharded
    from torch.distributed.checkpoint import filesystem, metadata

    names = ["Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"]
    names += ["TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"]
    paths = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}
    return {
        **{f"torch.distributed.checkpoint.metadata.{name}": getattr(metadata, name) for name in names},
        "torch.distributed.checkpoint.filesystem._StorageInfo": filesystem._StorageInfo,
        # Where these lay up to torch 2.2.
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": sharded.TensorProperties,
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": sharded.MEM_FORMAT_ENCODING,
        "torch.Size": torch.Size,
        "torch.serialization._get_layout": torch.serialization._get_layout,
        "collections.OrderedDict": OrderedDict,
        # Of the folder that was saved to; these touch no disk.
        **{f"{module}.{name}": kind for module in ("pathlib", "pathlib._local") for name, kind in paths.items()},
    }


def _read_metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / METADATA
    try:
        metadata = _Unpickler(read_regular(path, MAX_PICKLE_BYTES), path).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {_what_instead(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle fails in any way
        raise CheckpointError(f"{path} is damaged: its pickle ends with {type(error).__name__}: {error}") from None
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not torch.distributed.checkpoint's metadata")
    return metadata


def _what_instead(folder: Path) -> str:
    if not folder.is_dir():
        return "there is no such folder"
    if any(folder.glob("*.safetensors")):
        return "the folder holds safetensors files, which torchacc.load() reads as they are"
    if any(folder.glob("__*.metadata")):
        return "each rank wrote metadata of its own (use_collectives=False), which is not supported"
    return "it is written last, so that the save was not completed, or this is another folder"


def _key_paths(planner_data: Any) -> dict[str, tuple[Any, ...]]:
    if not isinstance(planner_data, dict):
        return {}
    return {key: tuple(path) for key, path in planner_data.items() if isinstance(path, (tuple, list))}


def _check_cover(path: Path, key: str, stored: StoredTensor) -> None:
    shape = stored.shape
    for box in stored.boxes:
        inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            min(offset, size) >= 0 and offset + size <= length
            for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{path}: {key}, of shape {shape}, has a part {box.sizes} at {box.offsets}")
    held = [box for box in stored.boxes if box.numel]
    numel = sum(box.numel for box in held)
    if numel != prod(shape) or len({box.offsets for box in held}) != len(held):
        raise CheckpointError(
            f"{path}: the parts of {key}, of shape {shape}, have {numel} elements: some are missing, or there twice"
        )


def _load(piece: Piece, key: str) -> Any:
    try:
        with open_regular(piece.path) as file, _Window(file, piece.start, piece.nbytes) as window:
            verify_records(window, f"{piece.path}: {key}, at byte {piece.start},")  # type: ignore[arg-type]
            return torch.load(window, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{piece.path} cannot be read: {error.strerror}") from None
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{piece.path}: {key}, at byte {piece.start}, is damaged, or no tensor or plain value: {reason}"
        ) from None
    except Exception as error:  # what lies there may be anything
        raise CheckpointError(
            f"{piece.path}: {key}, at byte {piece.start}, is damaged, or not what torch.save wrote: {error}"
        ) from None
