"""A checkpoint's folder on a disk: written by several processes at once, committed by a rename, verified when read.

The processes meet through the file system alone, so that writing can go on in a thread beside the training. The format
and its guarantees are in `docs/design/checkpoints.md`.
"""

import glob
import json
import os
import shutil
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import xxhash
from typing_extensions import Self

from torchacc.checkpoint.tensor_files import Slot, preallocate, read_exactly, read_slots, write_exactly
from torchacc.errors import CheckpointError

MANIFEST = "manifest.json"
_FORMAT = "torchacc-checkpoint"
_VERSION = 1
_SEGMENT_BYTES = 8 << 20
"""The most that one checksum covers: what a reader of other runs may have to read in vain at each of their ends."""
_POLL_SECS = 0.005
_PATIENCE_SECS = 3600.0
"""How long a process waits for the others to write their parts."""
_GIVE_UP_SECS = 10.0
"""How long rank 0 leaves the parts of a failed save for the others to see."""


class Segment(NamedTuple):
    """A run of bytes of a file that one checksum covers."""

    start: int
    size: int
    digest: str


class FolderWriter:
    """One process's part in writing a checkpoint folder.

    Rank 0 calls `prepare()`; when it has returned, every process calls `join()`, then `write()` and `write_file()` for
    its part, then `finish()`, or `fail()`.
    """

    def __init__(self, final: Path, token: str, rank: int, num_ranks: int) -> None:
        """Describe the save; nothing is touched.

        Args:
            final: The folder that is to be there in the end; what it is now is replaced then.
            token: What tells this save from others; the same on every process.
            rank: This process's.
            num_ranks: How many processes write.
        """
        self.final = final
        self.token = token
        self.folder = final.parent / f".{final.name}.{token}.incomplete"
        self._rank = rank
        self._num_ranks = num_ranks
        self._files: dict[str, int] = {}
        self._segments: dict[str, list[Segment]] = {}

    def prepare(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Make the folder, and in it room for files that several processes write. Called by rank 0 alone.

        Args:
            files: Name to what the file begins with, and its size in bytes.

        Raises:
            CheckpointError: There is no room, or no right to write.
        """
        try:
            self.final.parent.mkdir(parents=True, exist_ok=True)
            if self.final == Path.cwd():
                raise CheckpointError(
                    f"{self.final} is the working directory, which cannot be replaced: name another folder"
                )
            if self.final.exists() and not self.final.is_dir():
                raise CheckpointError(f"{self.final} is a file: name a folder to save a checkpoint in")
            if self.final.is_dir() and not (self.final / MANIFEST).exists() and any(self.final.iterdir()):
                raise CheckpointError(
                    f"{self.final} holds files that are no torchacc checkpoint, and saving would replace them: name "
                    "another folder, or empty it"
                )
            settle(self.final)
            needed, free = sum(size for _, size in files.values()), shutil.disk_usage(self.final.parent).free
            if needed > free:
                raise CheckpointError(
                    f"a checkpoint of {needed:,} bytes does not fit in {self.final.parent}, which has {free:,} left: "
                    "nothing was written"
                )
            self.folder.mkdir()
            for name, (header, size) in files.items():
                preallocate(self.folder / name, header, size)
                self._note(name, 0, header)
        except OSError as error:
            raise CheckpointError(f"{self.final}: a checkpoint cannot be written here: {error.strerror}") from None

    def join(self) -> None:
        """Leave this process's mark in the folder, which it may need no room for later.

        Raises:
            CheckpointError: The folder that rank 0 made is not here, or cannot be written.
        """
        try:
            self._mark("writing").touch()
        except OSError as error:
            raise CheckpointError(
                f"rank {self._rank} cannot write in {self.folder}, which rank 0 has made: {error.strerror}. Save to a "
                "file system that all machines share"
            ) from None

    def write(self, slot: Slot, start: int, data: torch.Tensor) -> None:
        """Write a run of a tensor's elements.

        Args:
            slot: The tensor's place.
            start: The first element of the run.
            data: The run: a contiguous host tensor of the slot's dtype.
        """
        assert data.dtype == slot.dtype, (data.dtype, slot)
        assert start + data.numel() <= slot.numel, (start, data.shape, slot)
        if data.numel():
            self._write(slot.path.name, slot.offset + start * slot.dtype.itemsize, as_bytes(data))

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file that is this process's alone."""
        self._file(name, os.O_CREAT | os.O_TRUNC)
        self._write(name, 0, memoryview(data))

    def finish(self) -> None:
        """Complete this process's part, wait for the others', and return when the checkpoint is in its place.

        Raises:
            CheckpointError: Any process has failed.
        """
        self._close(sync=True)
        report = {name: [list(segment) for segment in segments] for name, segments in self._segments.items()}
        self._mark("writing").write_text(json.dumps(report), encoding="utf-8")
        self._mark("writing").rename(self._mark("done"))
        if self._rank == 0:
            self._commit(self._wait_for_parts())
        else:
            self._wait_for_commit()

    def fail(self, error: BaseException) -> None:
        """Tell the other processes that this one has failed, so that they do not wait for it. Never raises."""
        self._close(sync=False)
        with suppress(OSError):
            self._mark("writing").rename(self._mark("failed"))  # a full disk allows this
            self._mark("failed").write_text(str(error), encoding="utf-8")
        if self._rank == 0:
            deadline = time.monotonic() + _GIVE_UP_SECS
            while time.monotonic() < deadline and any(self.folder.glob("rank-*.writing")):
                time.sleep(_POLL_SECS)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _mark(self, state: str) -> Path:
        return self.folder / f"rank-{self._rank}.{state}"

    def _file(self, name: str, flags: int = 0) -> int:
        if name not in self._files:
            self._files[name] = os.open(self.folder / name, os.O_WRONLY | flags, 0o666)
        return self._files[name]

    def _write(self, name: str, offset: int, data: memoryview) -> None:
        file = self._file(name)
        for start in range(0, len(data), _SEGMENT_BYTES):
            part = data[start : start + _SEGMENT_BYTES]
            self._note(name, offset + start, part)
            write_exactly(file, part, offset + start)

    def _note(self, name: str, offset: int, data: memoryview | bytes) -> None:
        self._segments.setdefault(name, []).append(Segment(offset, len(data), digest(data)))

    def _close(self, *, sync: bool) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            if sync:
                os.fsync(file)
            os.close(file)

    def _wait_for_parts(self) -> list[dict[str, list[list[Any]]]]:
        for _ in _polling(f"{self.folder}: some ranks have not written their parts"):
            self._raise_failures()
            if all((self.folder / f"rank-{rank}.done").exists() for rank in range(self._num_ranks)):
                break
        paths = [self.folder / f"rank-{rank}.done" for rank in range(self._num_ranks)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def _raise_failures(self) -> None:
        names: list[str] = []
        with suppress(FileNotFoundError):  # rank 0 has renamed the folder just now: nobody has failed
            names = sorted(os.listdir(self.folder))
        for name in names:
            if name.endswith(".failed"):
                reason = ""
                with suppress(OSError):
                    reason = (self.folder / name).read_text(encoding="utf-8")
                raise CheckpointError(
                    f"{self.final} was not saved: {name.removesuffix('.failed')}: {reason or 'failed'}"
                )

    def _commit(self, parts: Sequence[Mapping[str, list[list[Any]]]]) -> None:
        files: dict[str, list[Segment]] = {}
        for part in parts:
            for name, reported in part.items():
                files.setdefault(name, []).extend(Segment(*segment) for segment in reported)
        entries = {}
        for name, found in sorted(files.items()):
            size = (self.folder / name).stat().st_size
            segments = sorted(found)
            _check_cover(self.folder / name, segments, size)
            entries[name] = {"size": size, "segments": [[segment.size, segment.digest] for segment in segments]}
        write_synced(self.folder / MANIFEST, render_manifest({"token": self.token, "files": entries}))
        for path in self.folder.glob("rank-*.done"):
            path.unlink()
        sync_folder(self.folder)
        if self.final.exists():
            self.final.rename(_aside(self.final, self.token))
        self.folder.rename(self.final)
        sync_folder(self.final.parent)
        shutil.rmtree(_aside(self.final, self.token), ignore_errors=True)

    def _wait_for_commit(self) -> None:
        for _ in _polling(f"{self.folder}: rank 0 has not committed the checkpoint"):
            if self.folder.is_dir():
                self._raise_failures()
            elif _token_of(self.final) == self.token:
                return
            else:
                raise CheckpointError(f"{self.final} was not saved: rank 0 gave up")


class Folder:
    """A checkpoint to read: of torchacc, or any Hugging Face one with safetensors, which has no checksums.

    A context manager; everything that is read of a torchacc checkpoint is verified.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the manifest, and where the tensors lie.

        Raises:
            CheckpointError: There is no checkpoint, or it is not complete, or altered.
        """
        self.path = locate(Path(path))
        self.is_verified = (self.path / MANIFEST).exists()
        self._segments: dict[str, list[Segment]] = {}
        self._starts: dict[str, list[int]] = {}
        self._files: dict[str, int] = {}
        self._last: tuple[tuple[str, int], bytes] | None = None
        if self.is_verified:
            self._read_manifest()
        elif (self.path / "state.json").exists() or any(self.path.glob("rank-*.writing")) or _is_incomplete(self.path):
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
        files, self._files = self._files, {}
        for file in files.values():
            os.close(file)

    @property
    def files(self) -> list[str]:
        """Names of the files that the manifest lists."""
        return list(self._segments)

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return name in self._segments if self.is_verified else (self.path / name).is_file()

    def read_file(self, name: str) -> bytes:
        """Return all of a file."""
        buffer = bytearray((self.path / name).stat().st_size)
        self._read(name, 0, memoryview(buffer), name)
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
        count = (slot.numel if stop is None else stop) - start
        run = torch.empty(count, dtype=slot.dtype)
        if count:
            self._read(slot.path.name, slot.offset + start * slot.dtype.itemsize, as_bytes(run), name)
        return run

    def verify_headers(self) -> None:
        """Verify what a load of all tensors does not read: the files' headers, and the small files."""
        for name, segments in self._segments.items():
            if name.endswith(".safetensors"):
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
                self._segment(name, segment, self._tensor_at(name, segment.start))

    def _read_manifest(self) -> None:
        for name, entry in read_manifest(self.path)["files"].items():
            path = self.path / name
            sizes = [size for size, _ in entry["segments"]]
            starts = [0, *accumulate(sizes)]
            self._starts[name] = starts[:-1]
            self._segments[name] = [
                Segment(start, size, found) for start, (size, found) in zip(starts, entry["segments"], strict=False)
            ]
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: the checkpoint is not complete")
            if path.stat().st_size != entry["size"] or starts[-1] != entry["size"]:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size:,} bytes, and was written with {entry['size']:,}"
                )

    def _slots(self, stem: str) -> dict[str, Slot]:
        index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        name = next((name for name in (single, index) if self.has(name)), None)  # transformers' order
        if name is None:
            return {}
        if self.is_verified and name == index:
            self.read_file(name)
        slots = read_slots(self.path / name)
        for path in {slot.path for slot in slots.values()} if self.is_verified else ():
            if path.name not in self._segments:
                raise CheckpointError(f"{path} is not of this checkpoint: its {MANIFEST} does not list it")
            # Offsets that are wrong would be read as other tensors' bytes, which are right by themselves.
            self._segment(path.name, self._segments[path.name][0], f"header of {path.name}")
        return slots

    def _nothing(self) -> str:
        nothing = f"{self.path} holds no model.safetensors and no model.safetensors.index.json"
        pickled = sorted(path.name for path in self.path.glob("pytorch_model*.bin"))
        if not pickled:
            return nothing
        return (
            f"{nothing}, only {pickled[0]}, a pickle, which is not loaded: convert it to safetensors, by "
            "from_pretrained() and save_pretrained()"
        )

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.open(self.path / name, os.O_RDONLY)
        return self._files[name]

    def _read(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        if not self.is_verified:
            read_exactly(self._file(name), buffer, offset, self.path / name)
            return
        stop = offset + len(buffer)
        index = bisect_right(self._starts[name], offset) - 1
        for segment in self._segments[name][index:] if buffer else ():
            first, last = max(segment.start, offset), min(segment.start + segment.size, stop)
            if segment.start >= stop:
                break
            if last - first == segment.size:
                target = buffer[first - offset : last - offset]
                read_exactly(self._file(name), target, first, self.path / name)
                self._check(name, segment, target, what)
            elif first < last:
                part = self._segment(name, segment, what)
                buffer[first - offset : last - offset] = part[first - segment.start : last - segment.start]

    def _segment(self, name: str, segment: Segment, what: str) -> bytes:
        """Return a verified segment; the last one is kept, as neighbours share it."""
        key = (name, segment.start)
        if self._last is None or self._last[0] != key:
            data = bytearray(segment.size)
            read_exactly(self._file(name), memoryview(data), segment.start, self.path / name)
            self._check(name, segment, data, what)
            self._last = key, bytes(data)
        return self._last[1]

    def _check(self, name: str, segment: Segment, data: memoryview | bytearray, what: str) -> None:
        if digest(data) != segment.digest:
            raise CheckpointError(
                f"{self.path / name} is not as it was written: {what}, within the bytes {segment.start:,} to "
                f"{segment.start + segment.size:,}. Load another checkpoint"
            )

    def _tensor_at(self, name: str, offset: int) -> str:
        slots = {**self.model, **self.optimizer, **self.state}
        inside = (key for key, s in slots.items() if s.path.name == name and s.offset <= offset < s.offset + s.nbytes)
        return next(inside, name)


def digest(data: Any) -> str:
    """Return the checksum of bytes."""
    return xxhash.xxh3_64(data).hexdigest()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor that is not empty."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def render_manifest(content: Mapping[str, Any]) -> str:
    """Return the text of a manifest, which has a checksum of its own."""
    content = {"format": _FORMAT, "version": _VERSION, **content}
    return json.dumps({"xxh3": digest(_compact(content).encode()), "content": content}, separators=(",", ":")) + "\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a folder's manifest.

    Raises:
        CheckpointError: It is missing, altered, or of a later version.
    """
    file = path / MANIFEST
    try:
        text = file.read_bytes().decode()
        content = json.loads(text)["content"]
        intact = (
            text
            == json.dumps({"xxh3": digest(_compact(content).encode()), "content": content}, separators=(",", ":"))
            + "\n"
        )
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise CheckpointError(f"{file} is not as it was written: the checkpoint is altered or torn")
    if content["format"] != _FORMAT or content["version"] != _VERSION:
        raise CheckpointError(
            f"{file} is of {content['format']} {content['version']}, and this version of torchacc reads "
            f"{_FORMAT} {_VERSION}"
        )
    try:
        for name, entry in content["files"].items():
            if Path(name).name != name or name in ("", ".", ".."):
                raise CheckpointError(f"{file} names {name!r}: only files in its own folder are read")
            sizes = [int(size) for size, found in entry["segments"] if isinstance(found, str)]
            if min([int(entry["size"]), *sizes]) < 0 or len(sizes) != len(entry["segments"]):
                raise ValueError(name)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} makes no sense: torchacc has not written it") from None
    return dict(content)


def locate(path: Path) -> Path:
    """Return where the checkpoint of a path lies: there, or beside it where replacing it was cut short.

    Raises:
        CheckpointError: There is none.
    """
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file: name the folder that it is in")
    for other in _leftovers(path):
        if (other / MANIFEST).exists():
            return other
    raise CheckpointError(f"there is no checkpoint {path}")


def settle(path: Path) -> None:
    """Complete a replacement that was cut short, and remove what interrupted saves of a path have left."""
    if not path.exists():
        with suppress(CheckpointError):
            locate(path).rename(path)
    for other in _leftovers(path):
        shutil.rmtree(other, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Let what was made or renamed in a folder reach the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_synced(path: Path, text: str) -> None:
    """Write a file, and let it reach the disk."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _compact(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _aside(path: Path, token: str) -> Path:
    return path.parent / f".{path.name}.{token}.replaced"


def _leftovers(path: Path) -> list[Path]:
    """Return the folders of interrupted saves of a path, those first that would be the newest."""
    name = glob.escape(path.name)
    found = [other for kind in ("incomplete", "replaced") for other in path.parent.glob(f".{name}.*.{kind}")]
    return [other for other in found if other.name.count(".") == path.name.count(".") + 3]


def _is_incomplete(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".incomplete")


def _token_of(path: Path) -> str | None:
    try:
        return str(read_manifest(path)["token"])
    except CheckpointError:
        return None


def _check_cover(path: Path, segments: Sequence[Segment], size: int) -> None:
    position = 0
    for segment in segments:
        if segment.start != position:
            break
        position += segment.size
    if position != size:
        raise CheckpointError(f"{path}: byte {position:,} of {size:,} was written by no process, or by two")


def _polling(complaint: str) -> Iterator[None]:
    deadline = time.monotonic() + _PATIENCE_SECS
    while time.monotonic() < deadline:
        yield
        time.sleep(_POLL_SECS)
    raise CheckpointError(f"{complaint} within {_PATIENCE_SECS:.0f} s")
