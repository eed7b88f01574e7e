"""Carry out a conversion: which elements of which files become which of others, decided before anything is written.

A plan is plain data. It is carried out in chunks by several threads, in memory that does not grow with the files; what
it writes gets its name when all of it is complete, and the checksum of every record that was read is right.
"""

import os
import resource
import shutil
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from torchacc.checkpoint.crc import Crc
from torchacc.checkpoint.format.locks import clear_unfinished, unfinished
from torchacc.checkpoint.format.manifest import sync_folder
from torchacc.checkpoint.format.regular_files import open_regular
from torchacc.checkpoint.format.safetensors_files import Layout, Slot, preallocate, read_exactly, write_exactly
from torchacc.checkpoint.interop.pth import Blank, Written, blanks_in, create_pth, damaged_record, seal_pth
from torchacc.checkpoint.records import RecordChecks, Run, damaged
from torchacc.errors import CheckpointError

CHUNK_BYTES = 4 << 20
_MAX_WORKERS = 8

Progress = Callable[[int], None]
"""Is told, from any thread, how many bytes have been dealt with since the last time."""


@dataclass(frozen=True)
class Copy:
    """A run of elements of a tensor in a file that becomes one of a tensor to be made, cast where the dtypes differ."""

    source: Slot
    source_start: int
    target: Blank
    target_start: int
    numel: int

    @property
    def source_nbytes(self) -> int:
        """Bytes that are read."""
        return self.numel * self.source.dtype.itemsize

    @property
    def target_nbytes(self) -> int:
        """Bytes that are written."""
        return self.numel * self.target.dtype.itemsize

    @property
    def source_offset(self) -> int:
        """The first byte that is read, counted in the file."""
        return self.source.offset + self.source_start * self.source.dtype.itemsize

    def chunks(self) -> Iterator["Copy"]:
        """Yield this in pieces of at most `CHUNK_BYTES`, read as written."""
        step = CHUNK_BYTES // max(self.source.dtype.itemsize, self.target.dtype.itemsize)
        for done in range(0, self.numel, step):
            yield replace(
                self,
                source_start=self.source_start + done,
                target_start=self.target_start + done,
                numel=min(step, self.numel - done),
            )

    def read(self, buffer: bytearray) -> memoryview:
        """Return the bytes of the source; they lie in the buffer, which is as large as a chunk."""
        raw = memoryview(buffer)[: self.source_nbytes]
        try:
            with open_regular(self.source.path) as file:
                read_exactly(file.fileno(), raw, self.source_offset, self.source.path)
        except OSError as error:
            raise CheckpointError(f"{self.source.path} cannot be read: {error.strerror}") from None
        return raw

    def cast(self, raw: memoryview) -> memoryview:
        """Return the bytes to be written, which may be those of the source."""
        if self.source.dtype == self.target.dtype:
            return raw
        cast = torch.frombuffer(raw, dtype=self.source.dtype).to(self.target.dtype)
        return cast.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class NewFile(ABC):
    """A file that a plan writes."""

    path: Path
    """Its final name."""

    @property
    @abstractmethod
    def blanks(self) -> Sequence[Blank]:
        """The tensors in it, each once."""

    @property
    def nbytes(self) -> int:
        """Its size, but for what stands around the tensors."""
        return sum(blank.nbytes for blank in self.blanks)

    @abstractmethod
    def make(self, path: Path) -> Mapping[Blank, Slot]:
        """Make it under another name, and return where to write its tensors."""

    def finish(self, path: Path, written: Sequence[Written]) -> None:
        """Complete it once its tensors are written."""


@dataclass(frozen=True)
class PthFile(NewFile):
    """A `.pth` file."""

    contents: Any
    """What it holds, with a `Blank` in the place of each tensor."""

    @property
    @override
    def blanks(self) -> Sequence[Blank]:
        return blanks_in(self.contents)

    @override
    def make(self, path: Path) -> Mapping[Blank, Slot]:
        return create_pth(path, self.contents)

    @override
    def finish(self, path: Path, written: Sequence[Written]) -> None:
        seal_pth(path, written)


@dataclass(frozen=True)
class SafetensorsFile(NewFile):
    """A safetensors file."""

    layout: Layout
    by_name: Mapping[str, Blank]
    """At least the tensors of the layout."""

    @property
    @override
    def blanks(self) -> Sequence[Blank]:
        return [self.by_name[name] for name in self.layout.slots]

    @override
    def make(self, path: Path) -> Mapping[Blank, Slot]:
        preallocate(path, self.layout.header, self.layout.nbytes)
        return {self.by_name[name]: slot._replace(path=path) for name, slot in self.layout.slots.items()}


@dataclass(frozen=True)
class SmallFile(NewFile):
    """A file without tensors."""

    data: bytes

    @property
    @override
    def blanks(self) -> Sequence[Blank]:
        return ()

    @override
    def make(self, path: Path) -> Mapping[Blank, Slot]:
        path.write_bytes(self.data)
        return {}


@dataclass(frozen=True)
class Plan:
    """What is to be written, and from where."""

    sources: tuple[Path, ...]
    files: tuple[NewFile, ...]
    """In the order in which they get their final names."""
    copies: tuple[Copy, ...]
    stale: tuple[Path, ...] = ()
    """Files that would be taken for a part of the result, and must not be there."""

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that are written."""
        return sum(copy.target_nbytes for copy in self.copies)

    def work(self, *, verify: bool) -> int:
        """Return the sum of what `carry_out` tells its `progress`."""
        return 2 * self.nbytes + sum(path.stat().st_size for path in self.sources) if verify else self.nbytes

    def describe(self) -> str:
        """Return what would be written, a line for each file and each tensor."""
        by_target: defaultdict[Blank, list[Copy]] = defaultdict(list)
        for copy in self.copies:
            by_target[copy.target].append(copy)
        lines = []
        for file in self.files:
            lines.append(f"{file.path}: {file.nbytes:,} bytes")
            for blank in file.blanks:
                lines.append(f"  {blank.name} {_short(blank.dtype)} {blank.shape} <- {_origins(by_target[blank])}")
        return "\n".join(lines)


def carry_out(
    plan: Plan, *, workers: int | None = None, progress: Progress | None = None, verify: bool = False
) -> None:
    """Write the files of a plan, all of them or none.

    The checksum of every record of which anything is read is computed in passing, and compared before a file gets its
    name.

    Args:
        plan: What to write.
        workers: Threads that copy; None for one for each core, up to 8.
        progress: Is told of the work as it is done, `plan.work()` bytes in all.
        verify: Compare the checksums of all records of the source files before anything is written, also of those that
            are not needed; and read what was written, before it gets its name, and compare it with the sources.

    Raises:
        CheckpointError: A target is one of the sources, cannot be written or does not fit; or a source is damaged: the
            message names the file, the record and its tensor.
    """
    progress = progress or (lambda count: None)
    _refuse_targets(plan)
    if verify:
        verify_sources(plan, workers=workers, progress=progress)
    with _temporary_names(plan) as names:
        slots: dict[Blank, Slot] = {}
        for file in plan.files:
            with _naming(file.path):
                slots |= file.make(names[file.path])
        written = _write(plan, names, slots, workers, progress)
        for file in plan.files:
            with _naming(file.path):
                file.finish(names[file.path], written[file.path])
        if verify:
            _compare(plan.copies, slots, workers, progress)
        _commit(plan, names)


def load(blanks: Iterable[Blank], copies: Iterable[Copy], *, workers: int | None = None) -> dict[Blank, torch.Tensor]:
    """Return in memory what copies make of blanks, and write nothing.

    Raises:
        CheckpointError: A source is damaged.
    """
    tensors = {blank: torch.zeros(blank.shape, dtype=blank.dtype) for blank in blanks}
    views = {blank: tensor.view(-1).view(torch.uint8).numpy().data for blank, tensor in tensors.items()}

    def put(chunk: Copy, data: memoryview) -> None:
        start = chunk.target_start * chunk.target.dtype.itemsize
        views[chunk.target][start : start + len(data)] = data

    _each_chunk(copies, put, workers)
    return tensors


def verify_sources(plan: Plan, *, workers: int | None = None, progress: Progress | None = None) -> None:
    """Read the source files of a plan completely and compare them with the checksums in them.

    Raises:
        CheckpointError: One is damaged; the message names the file, the record and its tensor.
    """

    def check(path: Path) -> None:
        found = damaged_record(path)
        if found is not None:
            record, span = found
            names = {
                copy.target.name for copy in plan.copies if copy.source.path == path and copy.source.offset in span
            }
            raise damaged(path, record, names)
        if progress is not None:
            progress(path.stat().st_size)

    with ThreadPoolExecutor(_count(workers)) as pool:
        list(pool.map(check, plan.sources))


def _write(
    plan: Plan, names: Mapping[Path, Path], slots: Mapping[Blank, Slot], workers: int | None, progress: Progress
) -> Mapping[Path, list[Written]]:
    written: dict[Path, list[Written]] = {path: [] for path in names}
    finals = {name: path for path, name in names.items()}

    def put(chunk: Copy, data: memoryview) -> None:
        slot = slots[chunk.target]
        offset = slot.offset + chunk.target_start * slot.dtype.itemsize
        with _naming(finals[slot.path], chunk.target.name), slot.path.open("r+b", buffering=0) as file:
            write_exactly(file.fileno(), data, offset)
        written[finals[slot.path]].append(Written(offset, Crc.of(data)))
        progress(len(data))

    _each_chunk(plan.copies, put, workers)
    return written


def _compare(copies: Sequence[Copy], slots: Mapping[Blank, Slot], workers: int | None, progress: Progress) -> None:
    def compare(chunk: Copy, data: memoryview) -> None:
        slot = slots[chunk.target]
        found = bytearray(len(data))
        with slot.path.open("rb", buffering=0) as file:
            offset = slot.offset + chunk.target_start * slot.dtype.itemsize
            read_exactly(file.fileno(), memoryview(found), offset, slot.path)
        if found != data:
            raise CheckpointError(
                f"{chunk.target.name} was written into {slot.path.parent} and reads back otherwise: check that disk"
            )
        progress(len(data))

    _each_chunk(copies, compare, workers)


def _each_chunk(copies: Iterable[Copy], action: Callable[[Copy, memoryview], None], workers: int | None) -> None:
    """Read every chunk and do something with its bytes, in several threads; each has one buffer for all its chunks.

    What lies in the same records and is not to be copied is read as well, so that all their checksums are compared.
    """
    copies = list(copies)
    checks = RecordChecks([_run(copy) for copy in copies])
    chunks, lock, stop = _chunks(copies, checks), threading.Lock(), threading.Event()

    def work() -> None:
        buffer = bytearray(CHUNK_BYTES)
        try:
            while not stop.is_set():
                with lock:
                    chunk, counted, is_copied = next(chunks, (None, range(0), False))
                if chunk is None:
                    return
                raw = chunk.read(buffer)
                checks.add(chunk.source.path, chunk.source_offset, raw, counted)
                if is_copied:
                    action(chunk, chunk.cast(raw))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(_count(workers)) as pool:
        try:
            for done in [pool.submit(work) for _ in range(_count(workers))]:
                done.result()
        finally:  # also where this thread is interrupted
            stop.set()


def _run(copy: Copy) -> Run:
    start = copy.source_offset
    return Run(copy.source.path, range(start, start + copy.source_nbytes), copy.target.name)


def _chunks(copies: Sequence[Copy], checks: RecordChecks) -> Iterator[tuple[Copy, range, bool]]:
    """Yield what to read: chunks, which bytes of the file are counted with them, and whether they are copied."""
    for copy, counted in zip(copies, checks.counted, strict=True):
        for chunk in copy.chunks():
            yield chunk, counted, True
    for path, span, name in checks.unread:
        shape = (len(span),)
        unread = Copy(Slot(path, torch.uint8, shape, span.start), 0, Blank(name, torch.uint8, shape), 0, len(span))
        for chunk in unread.chunks():
            yield chunk, span, False


def _refuse_targets(plan: Plan) -> None:
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
def _temporary_names(plan: Plan) -> Iterator[dict[Path, Path]]:
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


def _commit(plan: Plan, names: Mapping[Path, Path]) -> None:
    """Let the files reach the disk, and only then give them their names."""
    for path, name in names.items():
        with _naming(path), name.open("rb") as complete:
            os.fsync(complete.fileno())
    for file in plan.files:
        with _naming(file.path):
            names[file.path].replace(file.path)
    for folder in {path.parent for path in names}:
        sync_folder(folder)


def _count(workers: int | None) -> int:
    return workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _origins(copies: Sequence[Copy]) -> str:
    runs = [f"{copy.source.path.name}[{copy.source_start}:{copy.source_start + copy.numel}]" for copy in copies]
    casts = {_short(copy.source.dtype) for copy in copies if copy.source.dtype != copy.target.dtype}
    return ", ".join(runs) + "".join(f", cast from {name}" for name in casts)
