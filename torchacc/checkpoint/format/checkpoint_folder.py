"""Read a checkpoint's folder, and verify what is read: see `docs/design/checkpoints.md`."""

import ctypes
import json
import mmap
import os
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from torchacc.checkpoint.format.manifest import (
    MANIFEST,
    Segment,
    as_bytes,
    hasher,
    is_incomplete,
    locate,
    read_manifest,
)
from torchacc.checkpoint.format.regular_files import open_regular
from torchacc.checkpoint.format.safetensors_files import Slot, read_exactly, read_header, read_slots
from torchacc.errors import CheckpointError

_PART_BYTES = 256 << 10
"""How much is read at a time. A checksum is fast while the bytes are in the processor's cache; and the system reads
ahead only after a few reads in a row, so that with larger ones a process would wait for each by itself."""


class _Part(NamedTuple):
    """What is to be read of one segment."""

    file: str
    start: int
    """The first byte, counted in the file."""
    target: memoryview
    segment: Segment
    """Where the folder has no checksums, of the same bytes and without one."""
    what: str
    """Named in an error's message."""
    is_new: bool = False
    """Whether the target has never been written to."""


class _Segments:
    """A file's segments, as the manifest lists them: all processes know of all, and each reads some."""

    def __init__(self, starts: list[int], listed: list[tuple[int, str]]) -> None:
        self._starts = starts
        self._listed = listed

    def __bool__(self) -> bool:
        return bool(self._listed)

    def __getitem__(self, index: int) -> Segment:
        return Segment(self._starts[index], *self._listed[index])

    def __iter__(self) -> Iterator[Segment]:
        return (self[index] for index in range(len(self._listed)))

    def within(self, start: int, stop: int) -> list[Segment]:
        """Return those in which bytes of a range lie, and possibly empty ones."""
        first, after = max(0, bisect_right(self._starts, start) - 1), bisect_left(self._starts, stop)
        return [self[index] for index in range(first, after)]


class Folder:
    """A checkpoint to read: of torchacc, or any Hugging Face one with safetensors, which has no checksums.

    A context manager; everything that is read of a torchacc checkpoint is verified.
    """

    def __init__(self, path: str | os.PathLike[str], *, begin: float = 0) -> None:
        """Read the manifest, and where the tensors lie.

        Args:
            path: The folder.
            begin: Where `carry_out()` begins, as a part of all that it reads. Processes that read at the same time do
                so as far from each other as they can: side by side, one waits for what the system reads ahead for
                another.

        Raises:
            CheckpointError: There is no checkpoint, or it is not complete, or altered.
        """
        self.path = locate(Path(path))
        self.is_verified = (self.path / MANIFEST).exists()
        self._segments: dict[str, _Segments] = {}
        self._files: dict[str, tuple[int, Path]] = {}
        self._close = weakref.finalize(self, _close, self._files)  # also where a load is refused before it is entered
        self._begin = begin
        self._planned: list[_Part] = []
        self._last: tuple[tuple[str, int], bytearray] | None = None
        if self.is_verified:
            self._read_manifest()
        elif (self.path / "state.json").exists() or any(self.path.glob("rank-*.writing")) or is_incomplete(self.path):
            raise CheckpointError(f"{self.path / MANIFEST} is missing: the checkpoint is not complete")
        self.model = self._slots("model")
        """Parameters and buffers: where they lie, by original name."""
        self.optimizer = self._slots("optimizer")
        """Optimizer state: where it lies, as `<parameter name>/<state name>`."""
        self.state = self._slots("state")
        """Tensors that other states hold."""
        if not self.model:
            raise CheckpointError(self._nothing())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    @property
    def files(self) -> list[str]:
        """Names of the files that the manifest lists."""
        return list(self._segments)

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return name in self._segments if self.is_verified else (self.path / name).is_file()

    def read_file(self, name: str) -> bytes:
        """Return all of a file."""
        with self._naming(self.path / name):
            buffer = bytearray((self.path / name).stat().st_size)
        for part in self._parts(name, 0, memoryview(buffer), name):
            self._read(part)
        return bytes(buffer)

    def read_json(self, name: str) -> Any:
        """Return what a JSON file says."""
        try:
            return json.loads(self.read_file(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / name} makes no sense: {error}") from None

    def read(self, name: str, slot: Slot, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return a run of a tensor's elements.

        Args:
            name: The tensor's, for an error's message.
            slot: Where it lies.
            start: The first element.
            stop: The first element after the run; None for all of the tensor.

        Returns:
            A host tensor of one dimension and the slot's dtype.

        Raises:
            CheckpointError: What is on the disk is not what was written.
        """
        run = torch.empty((slot.numel if stop is None else stop) - start, dtype=slot.dtype)
        for part in self._parts(slot.path.name, slot.offset + start * slot.dtype.itemsize, as_bytes(run), name):
            self._read(part)
        return run

    def plan_read(self, memory: memoryview, name: str, slot: Slot, start: int = 0, *, is_new: bool = False) -> None:
        """Note that memory, as bytes, is to be filled with a run of a tensor's elements.

        Where it is new, the system hands it out in larger parts.

        Nothing is read before `carry_out()`: one tight loop, so that the processor need not change back and forth
        between Python's bookkeeping and the tensors' bytes, which would drive it out of the cache each time.
        """
        self._planned += self._parts(slot.path.name, slot.offset + start * slot.dtype.itemsize, memory, name, is_new)

    def carry_out(self) -> None:
        """Read what was planned, as it lies in the files.

        Raises:
            CheckpointError: What is on the disk is not what was written; it may lie in a tensor now.
        """
        planned, self._planned = self._planned, []
        planned.sort(key=lambda part: (part.file, part.start))
        first = int(self._begin * len(planned))
        for part in planned[first:] + planned[:first]:
            self._read(part)

    def verify_headers(self) -> None:
        """Verify what a load of all tensors does not read: the files' headers, and the small files."""
        for name, segments in self._segments.items():
            if name.endswith(".safetensors") and segments:
                self._segment(name, segments[0], f"header of {name}")
            else:
                self.read_file(name)

    def verify(self) -> None:
        """Read and verify everything.

        Raises:
            CheckpointError: A file is missing, or not as it was written; or there are no checksums.
        """
        if not self.is_verified:
            raise CheckpointError(f"{self.path} has no {MANIFEST}, and so no checksums to verify")
        for name, segments in self._segments.items():
            for segment in segments:
                self._segment(name, segment)

    def _read_manifest(self) -> None:
        for name, entry in read_manifest(self.path)["files"].items():
            path = self.path / name
            starts = [0, *accumulate(size for size, _ in entry["segments"])]
            total = starts.pop()
            self._segments[name] = _Segments(starts, entry["segments"])
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path} is no file: torchacc has not written it")
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: the checkpoint is not complete")
            size = path.stat().st_size
            if size != entry["size"] or total != entry["size"]:
                raise CheckpointError(f"{path} has {size:,} bytes, and was written with {entry['size']:,}")

    def _slots(self, stem: str) -> dict[str, Slot]:
        index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        name = next((name for name in (single, index) if self.has(name)), None)  # transformers' order
        if name is None:
            return {}
        if self.is_verified and name == index:
            self.read_file(name)
        return read_slots(self.path / name, self._verified_header if self.is_verified else read_header)

    def _verified_header(self, path: Path) -> tuple[bytearray, int]:
        """Return a file's header and size: what a wrong offset leads to would be another tensor's bytes, and right."""
        if path.name not in self._segments:
            raise CheckpointError(f"{path} is not of this checkpoint: its {MANIFEST} does not list it")
        segments = self._segments[path.name]
        if not segments:
            raise CheckpointError(f"{path} is empty: it is not a safetensors file")
        header = self._segment(path.name, segments[0], f"header of {path.name}")
        return header, segments[-1].start + segments[-1].size

    def _nothing(self) -> str:
        below = sorted(path.parent.name for path in self.path.glob(f"*/{MANIFEST}"))
        if below:
            return (
                f"{self.path} is no checkpoint, and holds {len(below)}, the last of which is {below[-1]}: name one, as "
                f"{str(self.path / below[-1])!r}; or let CheckpointManager(folder, model=model, …).restore() load the "
                "newest that is whole"
            )
        nothing = f"{self.path} holds no model.safetensors and no model.safetensors.index.json"
        pickled = sorted(path.name for path in self.path.glob("pytorch_model*.bin"))
        if not pickled:
            return nothing
        return (
            f"{nothing}, only {pickled[0]}, a pickle, which is not loaded: convert it to safetensors, by "
            "from_pretrained() and save_pretrained()"
        )

    def _file(self, name: str) -> tuple[int, Path]:
        """Return a file's descriptor, and its path for an error's message."""
        if name not in self._files:
            path = self.path / name
            with self._naming(path), open_regular(path) as file:
                self._files[name] = os.dup(file.fileno()), path
        return self._files[name]

    @contextmanager
    def _naming(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            gone = "" if self.path.is_dir() else ": the checkpoint was removed while it was read"
            raise CheckpointError(f"{path} cannot be read: {error.strerror}{gone}") from None

    def _parts(self, file: str, offset: int, buffer: memoryview, what: str, is_new: bool = False) -> list[_Part]:
        """Return what is to be read of each segment to fill a buffer from an offset on."""
        if not self.is_verified:
            return [_Part(file, offset, buffer, Segment(offset, len(buffer), ""), what, is_new)]
        stop = offset + len(buffer)
        found = []
        for segment in self._segments[file].within(offset, stop):
            first, last = max(segment.start, offset), min(segment.start + segment.size, stop)
            if first < last:
                found.append(_Part(file, first, buffer[first - offset : last - offset], segment, what, is_new))
        return found

    def _read(self, part: _Part) -> None:
        if len(part.target) == part.segment.size:
            self._fill(part.target, part.file, part.segment, part.what, is_new=part.is_new)
        else:
            first = part.start - part.segment.start
            part.target[:] = self._segment(part.file, part.segment, part.what)[first : first + len(part.target)]

    def _segment(self, name: str, segment: Segment, what: str | None = None) -> bytearray:
        """Return a verified segment; the last one is kept, as neighbours share it."""
        key = (name, segment.start)
        if self._last is None or self._last[0] != key:
            data = bytearray(segment.size)
            self._fill(memoryview(data), name, segment, what)
            self._last = key, data
        return self._last[1]

    def _fill(self, buffer: memoryview, name: str, segment: Segment, what: str | None, *, is_new: bool = False) -> None:
        """Read a segment, and verify it."""
        file, path = self._file(name)
        found = hasher() if segment.digest else None
        for begin in range(0, segment.size, _PART_BYTES):
            part = buffer[begin : begin + _PART_BYTES]
            if is_new:
                _take_memory(part)
            read_exactly(file, part, segment.start + begin, path)
            if found is not None:
                found.update(part)
        if found is not None and found.hexdigest() != segment.digest:
            what = what or self._tensor_at(name, segment.start)
            raise CheckpointError(
                f"{path} is not as it was written: {what}, within the bytes {segment.start:,} to "
                f"{segment.start + segment.size:,}. Load another checkpoint"
            )

    def _tensor_at(self, name: str, offset: int) -> str:
        slots = {**self.model, **self.optimizer, **self.state}
        inside = (key for key, s in slots.items() if s.path.name == name and s.offset <= offset < s.offset + s.nbytes)
        return next(inside, name)


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_POPULATE_WRITE = 23


def _take_memory(part: memoryview) -> None:
    """Let the system hand out pages of new memory together: one by one, as they are written, takes longer.

    It is advice, which older systems refuse: https://man7.org/linux/man-pages/man2/madvise.2.html.
    """
    if len(part) == _PART_BYTES:
        start = ctypes.addressof(ctypes.c_char.from_buffer(part))
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise(first, (start + len(part)) // mmap.PAGESIZE * mmap.PAGESIZE - first, _MADV_POPULATE_WRITE)


def _close(files: dict[str, tuple[int, Path]]) -> None:
    while files:
        file, _ = files.popitem()[1]
        os.close(file)
