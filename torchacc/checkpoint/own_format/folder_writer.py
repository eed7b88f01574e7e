"""Write a checkpoint's folder by several processes at once, and commit it by a rename.

The processes meet through the file system alone, so that writing can go on in a thread beside the training. The format
and its guarantees are in `docs/design/checkpoints.md`.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from torchacc.checkpoint.own_format.manifest import (
    MANIFEST,
    Segment,
    aside,
    digest,
    read_manifest,
    render_manifest,
    token_of,
)
from torchacc.checkpoint.own_format.regular_files import sync_folder, write_synced
from torchacc.checkpoint.own_format.removal import (
    foreign_names,
    recover_interrupted,
    remove,
    remove_save_intent,
    write_save_intent,
)
from torchacc.checkpoint.own_format.safetensors_files import FileRegion, as_bytes, preallocate, write_exactly
from torchacc.errors import CheckpointError, listed

_SEGMENT_BYTES = 8 << 20
"""The most that one checksum covers: what a reader of other runs may have to read in vain at each of their ends."""
_POLL_SECS = 0.005
_PATIENCE_SECS = 3600.0
"""How long a process waits for the others to write their parts."""
_IS_TENSORS = re.compile(r"\.safetensors(\.index\.json)?$")
_GIVE_UP_SECS = 10.0
"""How long rank 0 leaves the parts of a failed save for the others to see."""


class FolderWriter:
    """One process's part in writing a checkpoint folder.

    Rank 0 calls `prepare()`; when it has returned, every process calls `begin()`, then `write()` and `write_file()` for
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

    def prepare(self, files: Mapping[str, tuple[bytes, int]], others: Iterable[str]) -> None:
        """Make the folder, and in it room for files that several processes write. Called by rank 0 alone.

        Args:
            files: Name to what the file begins with, and its size in bytes.
            others: Names of the files that one process writes by itself.

        Raises:
            CheckpointError: There is no room, or no right to write; or what is there now is not a checkpoint's.
        """
        names = {*files, *others}
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
                    f"{self.final} holds files that are not a torchacc checkpoint, and saving would replace them: name "
                    "another folder, or empty it"
                )
            _refuse_foreign(self.final, names)
            recover_interrupted(self.final)
            needed, free = sum(size for _, size in files.values()), shutil.disk_usage(self.final.parent).free
            if needed > free:
                raise CheckpointError(
                    f"a checkpoint of {needed:,} bytes does not fit in {self.final.parent}, which has {free:,} left: "
                    "nothing was written"
                )
            self.folder.mkdir()
            write_save_intent(self.folder, names)
            for name, (header, size) in files.items():
                preallocate(self.folder / name, header, size)
                self._note(name, 0, header)
        except OSError as error:
            remove(self.folder)
            raise CheckpointError(f"{self.final}: a checkpoint cannot be written here: {error.strerror}") from None

    def begin(self) -> None:
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

    def write(self, region: FileRegion, start: int, data: torch.Tensor) -> None:
        """Write consecutive elements of a tensor.

        Args:
            region: The tensor's place.
            start: The first of the elements.
            data: The elements: a contiguous host tensor of the region's dtype.
        """
        assert data.dtype == region.dtype, (data.dtype, region)
        assert start + data.numel() <= region.numel, (start, data.shape, region)
        if data.numel():
            self._write(region.path.name, region.offset + start * region.dtype.itemsize, as_bytes(data))

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
        for state in ("writing", "done"):
            with suppress(OSError), self._mark(state).open("r+", encoding="utf-8") as reason:
                reason.write(str(error))  # before the others look for it
                reason.truncate()
            with suppress(OSError):
                self._mark(state).rename(self._mark("failed"))  # a full disk allows this
        if self._rank == 0:
            deadline = time.monotonic() + _GIVE_UP_SECS
            while time.monotonic() < deadline and any(self.folder.glob("rank-*.[wd]*")):
                time.sleep(_POLL_SECS)
            remove(self.folder)

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
        remove_save_intent(self.folder)
        sync_folder(self.folder)
        if self.final.exists():
            self.final.rename(aside(self.final, self.token))
        self.folder.rename(self.final)
        sync_folder(self.final.parent)
        remove(aside(self.final, self.token), successor=self.final)

    def _wait_for_commit(self) -> None:
        for _ in _polling(f"{self.folder}: rank 0 has not committed the checkpoint"):
            if self.folder.is_dir():
                self._raise_failures()
            elif token_of(self.final) == self.token:
                return
            else:
                raise CheckpointError(f"{self.final} was not saved: rank 0 gave up")


def _refuse_foreign(path: Path, names: Set[str]) -> None:
    """Refuse to replace a checkpoint beside whose files lie others that could not stay, or that would be taken for it.

    Other files stay in the folder, beside those of the new checkpoint.
    """
    if not path.is_dir() or not (path / MANIFEST).exists():
        return
    read_manifest(path)  # raises where it cannot be known what is of the checkpoint
    foreign = foreign_names(path)
    folders = [name for name in foreign if (path / name).is_dir()]
    if folders:
        raise CheckpointError(
            f"{path} holds the folder {folders[0]}, which is not of the checkpoint there, and saving would remove it: "
            "move it, or name another folder"
        )
    confused = [name for name in foreign if name in names or _IS_TENSORS.search(name)]
    if confused:
        raise CheckpointError(
            f"{path} holds {listed(confused)}, not of the checkpoint there, and with a name of what is to be saved: "
            "move it, or name another folder"
        )


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
