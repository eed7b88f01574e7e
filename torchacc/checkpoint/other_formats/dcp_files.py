"""The folders of `torch.distributed.checkpoint`, read and written in one process, and without trusting them.

A folder holds `.metadata`, a pickle that says which entries there are and where they lie, and `.distcp` files. A tensor
lies there as the chunks that it was cut into, each as `torch.save` wrote it; anything else lies there as one such file.
PyTorch writes folders. What it reads has no checks, and parts of it are unpickled as they are: here `.metadata` is read
by an unpickler that knows the format's classes alone, and each chunk is compared with its checksum, shape and dtype.
"""

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from torchacc.checkpoint.other_formats.pth import loads_pth, naming
from torchacc.checkpoint.other_formats.unpickling import MAX_PICKLE_BYTES, Unpickler
from torchacc.checkpoint.own_format.regular_files import open_regular, read_regular
from torchacc.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

METADATA = ".metadata"
FILES = ("__0_0.distcp", METADATA, f"{METADATA}.tmp")
"""The files that `write_dcp()` makes."""
_GARBAGE_BYTES = 64 << 20
"""How much of what was written may be left in memory."""


class DcpFolder:
    """A folder to read."""

    def __init__(self, path: Path) -> None:
        """Read the metadata.

        Raises:
            CheckpointError: It is missing, damaged, or holds anything but metadata; or a file is missing or truncated.
        """
        self.path = path
        self.tensors: dict[str, TensorStorageMetadata] = {}
        """The tensors by key."""
        self.values: list[str] = []
        """The keys of other entries."""
        self._metadata = _read_metadata(path)
        try:
            self.key_paths: Mapping[str, tuple[Any, ...]] = _key_paths(self._metadata.planner_data)
            """The keys of the nested dicts that each key was made of; empty where they were not nested."""
            for key in self._in_order(self._metadata.state_dict_metadata):
                self._add(key)
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path / METADATA} is damaged, or of a layout that is not known: {type(error).__name__}: {error}"
            ) from None

    def read(self, key: str) -> torch.Tensor:
        """Return a full tensor.

        Raises:
            CheckpointError: A part of it is damaged, or of another save.
        """
        entry = self.tensors[key]
        full = torch.empty(entry.size, dtype=entry.properties.dtype)
        is_read = torch.zeros(entry.size, dtype=torch.bool)
        for chunk in entry.chunks:
            if prod(chunk.sizes):
                part: Any = self._load(key, tuple(chunk.offsets))
                is_plain = isinstance(part, torch.Tensor) and part.layout is torch.strided
                if not is_plain or (part.dtype, part.shape) != (full.dtype, chunk.sizes):
                    raise CheckpointError(
                        f"{self.path}: the part of {key} at {tuple(chunk.offsets)} is not as {METADATA} there has it, "
                        f"{full.dtype} of shape {tuple(chunk.sizes)}: the files are of different saves"
                    )
                if part.shape == full.shape:
                    found: torch.Tensor = part.contiguous()
                    return found
                begins_and_sizes = zip(chunk.offsets, chunk.sizes, strict=True)
                where = tuple(slice(begin, begin + size) for begin, size in begins_and_sizes)
                full[where] = part
                is_read[where] = True
        if not is_read.all():  # as there are as many elements as it has
            raise CheckpointError(f"{self.path / METADATA}: parts of {key}, of shape {tuple(full.shape)}, overlap")
        return full

    def value(self, key: str) -> Any:
        """Return an entry that is not a tensor: numbers, strings, and containers of them."""
        return self._load(key)

    def _in_order(self, keys: Iterable[str]) -> list[str]:
        """Return keys as they were in the state that was saved; ranks share the writing in any order."""
        order = {key: index for index, key in enumerate(self.key_paths)}
        return sorted(keys, key=lambda key: order.get(key, len(order)))

    def _add(self, key: str) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entry = self._metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            self._locate(key)
            self.values.append(key)
            return
        _check_parts(self.path / METADATA, key, tuple(entry.size), entry.chunks)
        for chunk in entry.chunks:
            if prod(chunk.sizes):  # what has no elements need not be stored
                path, start, nbytes = self._locate(key, tuple(chunk.offsets))
                if nbytes < prod(chunk.sizes) * entry.properties.dtype.itemsize:
                    raise CheckpointError(f"{path}: {key}, at byte {start}, is damaged: its shape needs more bytes")
        self.tensors[key] = entry

    def _locate(self, key: str, offsets: tuple[int, ...] | None = None) -> tuple[Path, int, int]:
        """Return the file of an entry, or of a chunk of a tensor, its first byte there, and its bytes."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        info = self._metadata.storage_data.get(MetadataIndex(key, offsets))
        if info is None:
            raise CheckpointError(f"{self.path / METADATA} does not say where {key} lies")
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
        return path, info.offset, info.length

    def _load(self, key: str, offsets: tuple[int, ...] | None = None) -> Any:
        path, start, nbytes = self._locate(key, offsets)
        name = f"{path}: {key}, at byte {start},"
        with naming(path), open_regular(path) as file:
            file.seek(start)
            saved = file.read(nbytes)
        return loads_pth(saved, name)


def write_dcp(folder: Path, state: Mapping[str, Any], read: Callable[[str], torch.Tensor]) -> None:
    """Write a folder by `torch.distributed.checkpoint.save()`, in the memory that the largest tensor takes.

    Args:
        folder: Where to write it.
        state: Nested dicts, with tensors of the device meta in the place of those that are read when they are written.
        read: Returns such a tensor; it gets its key, which is the keys of the dicts joined by dots.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class ReadingPlanner(DefaultSavePlanner):
        """Reads a tensor when it is written."""

        left = 0

        @override
        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            if not isinstance(found, torch.Tensor) or found.device.type != "meta":
                return found
            self.left += found.nbytes
            if self.left > _GARBAGE_BYTES:  # torch.save() leaves what it saved in a cycle of references
                gc.collect()
                self.left = 0
            return read(index.fqn)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        try:
            writer = FileSystemWriter(folder)
            save(dict(state), storage_writer=writer, planner=ReadingPlanner(), no_dist=True)
        except CheckpointException as failed:  # it holds what each rank has raised
            raise next(iter(failed.failures.values()))[0] from None


class _MetadataUnpickler(Unpickler):
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
                f"{self._path} holds a {module}.{name}, which is not metadata of torch.distributed.checkpoint: reading "
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


def _read_metadata(folder: Path) -> "Metadata":
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / METADATA
    try:
        metadata = _MetadataUnpickler(read_regular(path, MAX_PICKLE_BYTES), path).load()
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
        return "the folder holds safetensors files, which torchacc.checkpoint.load() reads as they are"
    if any(folder.glob("__*.metadata")):
        return "each rank wrote metadata of its own (use_collectives=False), which is not supported"
    return "it is written last, so that the save was not completed, or this is another folder"


def _key_paths(planner_data: Any) -> dict[str, tuple[Any, ...]]:
    if not isinstance(planner_data, dict):
        return {}
    return {key: tuple(path) for key, path in planner_data.items() if isinstance(path, (tuple, list))}


def _check_parts(path: Path, key: str, shape: tuple[int, ...], chunks: Iterable["ChunkStorageMetadata"]) -> None:
    """Refuse chunks that do not lie within a tensor, or have not as many elements as it."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            min(offset, size) >= 0 and offset + size <= length
            for offset, size, length in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(f"{path}: {key}, of shape {shape}, has a part {sizes} at {offsets}")
    numel = sum(prod(sizes) for _, sizes in boxes)
    if numel != prod(shape):
        raise CheckpointError(
            f"{path}: the parts of {key}, of shape {shape}, have {numel} elements: some are missing, or there twice"
        )
