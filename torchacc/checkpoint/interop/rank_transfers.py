"""One plan and one executor for every conversion of rank files: which elements of which files become which of others.

A plan is plain data. It is executed in chunks by several threads, in memory that does not grow with the files; what it
writes gets its name when all of it is complete, and the checksum of every record that was read is right.
"""

import os
import resource
import shutil
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import override

from torchacc.checkpoint.format.locks import clear_unfinished, unfinished
from torchacc.checkpoint.format.manifest import sync_folder
from torchacc.checkpoint.format.safetensors_files import (
    FileRegion,
    SafetensorsLayout,
    preallocate,
    read_exactly,
    write_exactly,
)
from torchacc.checkpoint.interop.pth import CHUNK_BYTES, NewTensor, RecordReader, create_pth, leaves, seal_pth
from torchacc.errors import CheckpointError

_MAX_WORKERS = 8

Progress = Callable[[int], None]
"""Is told, from any thread, how many bytes have been dealt with since the last time."""


class Source(NamedTuple):
    """A tensor in a file, of which the first elements are taken: what follows is padding."""

    slot: FileRegion
    numel: int


@dataclass(frozen=True)
class Transfer:
    """Elements that keep their order: those of some tensors in files fill some new tensors, one after another.

    The dtypes of all sources are the same, and those of all targets; they are cast where the two differ. What remains
    of the last targets is zeros.
    """

    sources: tuple[Source, ...]
    targets: tuple[NewTensor, ...]

    @property
    def numel(self) -> int:
        """Elements that are copied."""
        return sum(source.numel for source in self.sources)

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return self.numel * self.targets[0].dtype.itemsize

    def origin(self, target: NewTensor) -> str:
        """Return where the elements of a target come from: names of files, and the elements of their tensors."""
        begin = sum(other.numel for other in self.targets[: self.targets.index(target)])
        found, start = [], 0
        for slot, numel in self.sources:
            first, last = max(begin, start) - start, min(begin + target.numel, start + numel) - start
            if first < last:
                found.append(f"{slot.path.name}[{first}:{last}]")
            start += numel
        own = self.sources[0].slot.dtype
        return ", ".join(found) + (f", cast from {_short(own)}" if own != target.dtype else "")


@dataclass(frozen=True)
class NewFile(ABC):
    """A file that a plan writes."""

    path: Path
    """Its final name."""

    @property
    def tensors(self) -> Sequence[NewTensor]:
        """The tensors in it, each once."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @abstractmethod
    def create(self, path: Path) -> Mapping[NewTensor, FileRegion]:
        """Make it under another name, and return where to write its tensors."""

    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        """Complete it once its tensors are written; `checksums` are theirs, by their first bytes."""


@dataclass(frozen=True)
class SmallFile(NewFile):
    """A file without tensors."""

    data: bytes

    @override
    def create(self, path: Path) -> Mapping[NewTensor, FileRegion]:
        path.write_bytes(self.data)
        return {}


@dataclass(frozen=True)
class PthFile(NewFile):
    """A `.pth` file."""

    contents: Any
    """What it holds, with a `NewTensor` in the place of each tensor."""

    def __post_init__(self) -> None:
        """Refuse a name by which it would be taken for what it is not."""
        if self.path.suffix == ".safetensors":
            raise CheckpointError(
                f"{self.path} would be a pickle, as the format is pth: name it .pth, or write the format safetensors "
                "and name a folder"
            )

    @property
    @override
    def tensors(self) -> Sequence[NewTensor]:
        return list(dict.fromkeys(leaves(self.contents, NewTensor)))

    @override
    def create(self, path: Path) -> Mapping[NewTensor, FileRegion]:
        return create_pth(path, self.contents)

    @override
    def seal(self, path: Path, checksums: Mapping[int, int]) -> None:
        seal_pth(path, checksums)


@dataclass(frozen=True)
class SafetensorsFile(NewFile):
    """A safetensors file."""

    layout: SafetensorsLayout
    by_name: Mapping[str, NewTensor]
    """At least the tensors of the layout."""

    @property
    @override
    def tensors(self) -> Sequence[NewTensor]:
        return [self.by_name[name] for name in self.layout.regions]

    @override
    def create(self, path: Path) -> Mapping[NewTensor, FileRegion]:
        preallocate(path, self.layout.header, self.layout.nbytes)
        return {self.by_name[name]: slot._replace(path=path) for name, slot in self.layout.regions.items()}


@dataclass(frozen=True)
class ConversionPlan:
    """What is to be written, and from where."""

    sources: tuple[Path, ...]
    files: tuple[NewFile, ...]
    """In the order in which they get their final names."""
    transfers: tuple[Transfer, ...]
    stale: tuple[Path, ...] = ()
    """Files that would be taken for a part of the result, and must not be there."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are written."""
        return sum(transfer.nbytes for transfer in self.transfers)

    def work(self, *, verify: bool) -> int:
        """Return the sum of what `execute` tells its `progress`."""
        return 2 * self.nbytes + sum(path.stat().st_size for path in self.sources) if verify else self.nbytes

    def describe(self) -> str:
        """Return what would be written, a line for each file and each tensor."""
        transfer_of = {target: transfer for transfer in self.transfers for target in transfer.targets}
        lines = []
        for file in self.files:
            lines.append(f"{file.path}: {file.nbytes:,} bytes")
            for new in file.tensors:
                lines.append(f"  {new.name} {_short(new.dtype)} {new.shape} <- {transfer_of[new].origin(new)}")
        return "\n".join(lines)


def execute(
    plan: ConversionPlan, *, workers: int | None = None, progress: Progress | None = None, verify: bool = False
) -> None:
    """Write the files of a plan, all of them or none.

    The checksum of every record of which anything is read is compared before a file gets its name.

    Args:
        plan: What to write.
        workers: Threads that copy; None for one for each core, up to 8.
        progress: Is told of the work as it is done, `plan.work()` bytes in all.
        verify: Compare the checksums of all records of the source files before anything is written, also of those that
            are not needed; and read what was written before it gets its name.

    Raises:
        CheckpointError: A target is one of the sources, cannot be written or does not fit; or a source is damaged: the
            message names the file, the record and its tensor.
    """
    progress = progress or (lambda count: None)
    _refuse_targets(plan)
    reader = _reader(plan.transfers)

    def verify_source(path: Path) -> None:
        reader.verify(path)
        progress(path.stat().st_size)

    if verify:
        _each(verify_source, plan.sources, workers)
    with _temporary_names(plan) as names:
        slots: dict[NewTensor, FileRegion] = {}
        for file in plan.files:
            with _naming(file.path):
                slots |= file.create(names[file.path])
        finals = {name: path for path, name in names.items()}
        checksums = dict.fromkeys(slots, 0)

        def write(target: NewTensor, position: int, data: memoryview) -> None:
            slot = slots[target]
            with _naming(finals[slot.path], target.name), slot.path.open("r+b", buffering=0) as opened:
                write_exactly(opened.fileno(), data, slot.offset + position)
            checksums[target] = zlib.crc32(data, checksums[target])
            progress(len(data))

        _each(lambda transfer: _copy(transfer, reader, write), plan.transfers, workers)
        for transfer in plan.transfers:
            for target, filled in _filled(transfer):
                checksums[target] = _crc_of_zeros(target.nbytes - filled, checksums[target])
        for file in plan.files:
            with _naming(file.path):
                own = {slots[tensor].offset: checksums[tensor] for tensor in file.tensors}
                file.seal(names[file.path], own)
        if verify:
            _each(lambda new: _compare(new, slots[new], checksums[new], progress), list(slots), workers)
        _commit(plan, names)


def load(transfers: Sequence[Transfer], *, workers: int | None = None) -> dict[NewTensor, torch.Tensor]:
    """Return in memory what transfers make of new tensors, and write nothing.

    Raises:
        CheckpointError: A source is damaged.
    """
    targets = [target for transfer in transfers for target in transfer.targets]
    tensors = {target: torch.zeros(target.shape, dtype=target.dtype) for target in targets}

    def put(target: NewTensor, position: int, data: memoryview) -> None:
        tensors[target].view(-1).view(torch.uint8).numpy().data[position : position + len(data)] = data

    reader = _reader(transfers)
    _each(lambda transfer: _copy(transfer, reader, put), transfers, workers)
    return tensors


def _copy(transfer: Transfer, reader: RecordReader, write: Callable[[NewTensor, int, memoryview], None]) -> None:
    """Read the sources one after another, and write what they hold into the targets, each from its begin to its end."""
    targets = iter(transfer.targets)
    target, position = next(targets), 0
    for slot, numel in transfer.sources:
        for raw in reader.read(slot, numel * slot.dtype.itemsize):
            data = _cast(raw, slot.dtype, target.dtype)
            while data:
                while position == target.nbytes:
                    target, position = next(targets), 0
                part = data[: target.nbytes - position]
                write(target, position, part)
                position += len(part)
                data = data[len(part) :]


def _cast(raw: memoryview, source: torch.dtype, target: torch.dtype) -> memoryview:
    """Return the bytes to be written, which may be those of the source."""
    if source == target:
        return raw
    return torch.frombuffer(raw, dtype=source).to(target).view(torch.uint8).numpy().data


def _filled(transfer: Transfer) -> Iterator[tuple[NewTensor, int]]:
    """Yield the targets, and how many bytes of each are written."""
    left = transfer.nbytes
    for target in transfer.targets:
        yield target, min(left, target.nbytes)
        left -= min(left, target.nbytes)


def _crc_of_zeros(count: int, crc: int) -> int:
    zeros = bytes(min(count, CHUNK_BYTES))
    for done in range(0, count, CHUNK_BYTES):
        crc = zlib.crc32(zeros[: count - done], crc)
    return crc


def _compare(new: NewTensor, slot: FileRegion, checksum: int, progress: Progress) -> None:
    """Read a tensor that was written, and compare it with what was to be written."""
    buffer, crc = bytearray(min(new.nbytes, CHUNK_BYTES)), 0
    with slot.path.open("rb", buffering=0) as file:
        for start in range(0, new.nbytes, CHUNK_BYTES):
            data = memoryview(buffer)[: new.nbytes - start]
            read_exactly(file.fileno(), data, slot.offset + start, slot.path)
            crc = zlib.crc32(data, crc)
            progress(len(data))
    if crc != checksum:
        raise CheckpointError(
            f"{new.name} was written into {slot.path.parent} and reads back otherwise: check that disk"
        )


def _reader(transfers: Iterable[Transfer]) -> RecordReader:
    names: dict[FileRegion, str] = {}
    for transfer in transfers:
        for slot, _ in transfer.sources:
            names.setdefault(slot, ", ".join(target.name for target in transfer.targets))
    return RecordReader(names)


def _each(action: Callable[[Any], None], items: Sequence[Any], workers: int | None) -> None:
    """Do something with each item in several threads; the first error ends it."""
    count = workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(count) as pool:
        try:
            for done in [pool.submit(action, item) for item in items]:
                done.result()
        finally:  # also where this thread is interrupted
            pool.shutdown(cancel_futures=True)


def _refuse_targets(plan: ConversionPlan) -> None:
    sources = {path.resolve() for path in plan.sources}
    twice = [path for path, count in Counter(file.path.resolve() for file in plan.files).items() if count > 1]
    if twice:
        raise CheckpointError(f"{twice[0]} would be written twice, with other contents: give each its own name")
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    for file in plan.files:
        if file.path.is_dir():
            raise CheckpointError(f"{file.path} is a folder: name the file to write, such as {file.path / 'model.pth'}")
        if file.path.exists() and not file.path.is_file():
            raise CheckpointError(f"{file.path} is a device or the like, which a file would replace: name a file")
        if largest != resource.RLIM_INFINITY and file.nbytes > largest:
            raise CheckpointError(
                f"{file.path} takes more than {file.nbytes:,} bytes, and this process may write files of {largest:,}: "
                "raise that limit (ulimit -f)"
            )
        if file.path.resolve() in sources:
            raise CheckpointError(f"{file.path} is one of the files that are read: write elsewhere")
    for path in plan.stale:
        if path.exists():
            raise CheckpointError(f"{path} is there already and would be read in place of the result: remove it first")


@contextmanager
def _temporary_names(plan: ConversionPlan) -> Iterator[dict[Path, Path]]:
    """Yield names to write under, hidden and beside the final ones; nothing is left there afterwards."""
    names = {file.path: unfinished(file.path) for file in plan.files}
    try:
        for folder in {path.parent for path in names}:
            folder.mkdir(parents=True, exist_ok=True)
            clear_unfinished(folder)
            needed = sum(file.nbytes for file in plan.files if file.path.parent == folder)
            free = shutil.disk_usage(folder).free
            if needed > free:
                raise CheckpointError(
                    f"{folder} has {free:,} bytes left, and {needed:,} are needed: nothing was written"
                )
        yield names
    except OSError as error:
        where = error.filename or next(iter(names)).parent
        raise _unwritten(where, error) from None
    finally:
        for name in names.values():
            with suppress(OSError):
                name.unlink()


@contextmanager
def _naming(path: Path, tensor: str = "") -> Iterator[None]:
    """Give errors of the system the final name of the file that is written, and the tensor."""
    try:
        yield
    except OSError as error:
        raise _unwritten(path, error, tensor) from None


def _unwritten(path: Path | str, error: OSError, tensor: str = "") -> CheckpointError:
    where = f" (at {tensor})" if tensor else ""
    return CheckpointError(f"{path} cannot be written: {error.strerror or error}{where}; nothing is left of it")


def _commit(plan: ConversionPlan, names: Mapping[Path, Path]) -> None:
    """Let the files reach the disk, and only then give them their names."""
    for path, name in names.items():
        with _naming(path), name.open("rb") as complete:
            os.fsync(complete.fileno())
    for file in plan.files:
        with _naming(file.path):
            names[file.path].replace(file.path)
    for folder in {path.parent for path in names}:
        sync_folder(folder)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
