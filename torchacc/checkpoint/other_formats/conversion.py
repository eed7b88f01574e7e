"""Write files whose tensors come from other files, as rank files are converted.

A plan is plain data. It is executed in chunks by several threads, in memory that does not grow with the files; what it
writes gets its name when all of it is complete, and the checksum of every record that was read is right.
"""

import os
import resource
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchacc.checkpoint.other_formats.new_tensors import NewTensor, leaves, read_chunks, short
from torchacc.checkpoint.other_formats.pth import create_pth, seal_pth, verify_regions
from torchacc.checkpoint.own_format.regular_files import FileState
from torchacc.checkpoint.own_format.safetensors_files import FileRegion, SafetensorsLayout, preallocate, write_exactly
from torchacc.checkpoint.own_format.unfinished import unfinished_paths, unwritten
from torchacc.errors import CheckpointError

_MAX_WORKERS = 8

Progress = Callable[[int], None]
"""Is told, from any thread, how many bytes have been dealt with since the last time."""


@dataclass(frozen=True)
class NewFile:
    """A file that a plan writes."""

    path: Path
    """Its final name."""
    tensors: Sequence[NewTensor]
    """The tensors in it, each once."""
    create: Callable[[Path], Mapping[NewTensor, FileRegion]]
    """Makes it under another name, and returns where to write its tensors."""
    seal: Callable[[Path, Mapping[int, int]], None] = lambda path, checksums: None
    """Completes it once its tensors are written; the checksums are theirs, by their first bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def small_file(path: Path, data: bytes) -> NewFile:
    """Return a file without tensors."""
    return NewFile(path, (), lambda name: {} if name.write_bytes(data) else {})


def pth_file(path: Path, contents: Any) -> NewFile:
    """Return a `.pth` file that holds `contents`, with a `NewTensor` in the place of each tensor.

    Raises:
        CheckpointError: By its name it would be taken for what it is not.
    """
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} would be a pickle, as the format is pth: name it .pth, or write the format safetensors and name a "
            "folder"
        )
    tensors = list(dict.fromkeys(leaves(contents, NewTensor)))
    return NewFile(path, tensors, lambda name: create_pth(name, contents), seal_pth)


def safetensors_file(path: Path, layout: SafetensorsLayout, by_name: Mapping[str, NewTensor]) -> NewFile:
    """Return a safetensors file; `by_name` has at least the tensors of the layout."""

    def create(name: Path) -> Mapping[NewTensor, FileRegion]:
        preallocate(name, layout.header, layout.nbytes)
        return {by_name[key]: region._replace(path=name) for key, region in layout.regions.items()}

    return NewFile(path, [by_name[key] for key in layout.regions], create)


@dataclass(frozen=True)
class ConversionPlan:
    """What is to be written, and from where."""

    sources: tuple[tuple[Path, FileState], ...]
    """The files that are read, each as it was when the plan was made."""
    files: tuple[NewFile, ...]
    """In the order in which they get their final names."""
    stale: tuple[Path, ...] = ()
    """Files that would be taken for a part of the result, and must not be there."""

    def work(self, *, verify: bool) -> int:
        """Return the sum of what `execute` tells its `progress`."""
        return (2 if verify else 1) * sum(file.nbytes for file in self.files)

    def describe(self) -> str:
        """Return what would be written, a line for each file and each tensor."""
        lines = []
        for file in self.files:
            lines.append(f"{file.path}: {file.nbytes:,} bytes")
            lines += [f"  {new.name} {short(new.dtype)} {new.shape} <- {new.origin()}" for new in file.tensors]
        return "\n".join(lines)


def execute(
    plan: ConversionPlan, *, workers: int | None = None, progress: Progress | None = None, verify: bool = False
) -> None:
    """Write the files of a plan, all of them or none.

    The checksum of every record of which anything is read is compared before.

    Args:
        plan: What to write.
        workers: Threads that copy; None for one for each core, up to 8.
        progress: Is told of bytes that are written, and read back: `plan.work()` in all.
        verify: Compare the checksums of all records of the source files, also of those that are not needed; and read
            what was written before it gets its name.

    Raises:
        CheckpointError: A target is one of the sources, cannot be written or does not fit; or a source is damaged: the
            message names the file, the record and its tensor.
    """
    _refuse_targets(plan)
    tensors = [new for file in plan.files for new in file.tensors]
    with unfinished_paths([file.path for file in plan.files]) as names:
        _check_room(plan)
        with verified_sources(tensors, plan.sources, workers, everything=verify):
            for file, name in zip(plan.files, names, strict=True):
                with _naming(file.path):
                    regions = file.create(name)
                copies = [_Copy(new, region, file.path, verify, progress) for new, region in regions.items()]
                checksums = _each(_Copy.write, copies, workers)
                by_offset = {copy.region.offset: checksum for copy, checksum in zip(copies, checksums, strict=True)}
                with _naming(file.path):
                    file.seal(name, by_offset)


@contextmanager
def verified_sources(
    tensors: Iterable[NewTensor],
    sources: Sequence[tuple[Path, FileState]],
    workers: int | None,
    *,
    everything: bool = False,
) -> Iterator[None]:
    """Compare the records that tensors are read from with their checksums, and then let them be read.

    Args:
        tensors: The tensors.
        sources: The files, and how they were when it was planned to read the tensors.
        workers: As for `execute()`.
        everything: Compare all records of the files.

    Raises:
        CheckpointError: One is damaged; or a file has been changed, or replaced, until the context is left.
    """
    _check_unchanged(sources)
    regions: dict[Path, set[tuple[FileRegion, str]]] = {path: set() for path, _ in sources}
    for new in tensors:
        for region, _, _ in new.sources:
            regions[region.path].add((region, new.name))
    _each(lambda path: verify_regions(path, regions[path], everything=everything), list(regions), workers)
    yield
    _check_unchanged(sources)


def _check_unchanged(sources: Iterable[tuple[Path, FileState]]) -> None:
    for path, state in sources:
        if FileState.of(path) != state:
            raise CheckpointError(f"{path} has been changed while it was read: convert it again when it is complete")


@dataclass(frozen=True)
class _Copy:
    """A tensor that is written into a file."""

    new: NewTensor
    region: FileRegion
    path: Path
    """The final name of the file."""
    verifies: bool
    """Whether it is read back."""
    progress: Progress | None

    def write(self) -> int:
        """Write it, and return its checksum."""
        crc, position = 0, self.region.offset
        with _naming(self.path, self.new.name), self.region.path.open("r+b", buffering=0) as file:
            for data in self.new.chunks():
                write_exactly(file.fileno(), data, position)
                crc = zlib.crc32(data, crc)
                position += len(data)
                self._tell(data)
        if self.verifies and crc != self._written():
            raise CheckpointError(
                f"{self.new.name} was written into {self.path.parent} and reads back otherwise: check that disk"
            )
        return crc

    def _written(self) -> int:
        """Return the checksum of what is in the file."""
        crc = 0
        for data in read_chunks(self.region, 0, self.region.numel):
            crc = zlib.crc32(data, crc)
            self._tell(data)
        return crc

    def _tell(self, data: memoryview) -> None:
        if self.progress is not None:
            self.progress(len(data))


def _each(action: Callable[[Any], Any], items: Sequence[Any], workers: int | None) -> list[Any]:
    """Return what comes of each item, in several threads; the first error ends it."""
    with ThreadPoolExecutor(workers or min(_MAX_WORKERS, len(os.sched_getaffinity(0)))) as pool:
        try:
            return [done.result() for done in [pool.submit(action, item) for item in items]]
        finally:  # also where this thread is interrupted
            pool.shutdown(cancel_futures=True)


def _refuse_targets(plan: ConversionPlan) -> None:
    sources = {path.resolve() for path, _ in plan.sources}
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


def _check_room(plan: ConversionPlan) -> None:
    for folder in {file.path.parent for file in plan.files}:
        needed = sum(file.nbytes for file in plan.files if file.path.parent == folder)
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise CheckpointError(f"{folder} has {free:,} bytes left, and {needed:,} are needed: nothing was written")


@contextmanager
def _naming(path: Path, tensor: str = "") -> Iterator[None]:
    """Give errors of the system the final name of the file that is written, and the tensor."""
    try:
        yield
    except OSError as error:
        raise unwritten(path, error, f" (at {tensor})" if tensor else "") from None
