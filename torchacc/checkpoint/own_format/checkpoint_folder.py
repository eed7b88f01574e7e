"""Read a checkpoint's folder: nothing that was not verified, and nothing of what does not belong to it."""

import json
import os
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from typing_extensions import Self

from torchacc.checkpoint.own_format.manifest import (
    MANIFEST,
    Segment,
    digest,
    hint_of_others,
    is_incomplete,
    locate,
    read_manifest,
)
from torchacc.checkpoint.own_format.regular_files import open_regular
from torchacc.checkpoint.own_format.safetensors_files import (
    FileRegion,
    as_bytes,
    read_exactly,
    read_header,
    read_regions,
)
from torchacc.errors import CheckpointError


@dataclass(frozen=True)
class StoredTensor:
    """A full tensor that can be read, a part at a time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """What it is stored in."""
    origin: str
    """Where it is stored, for an error's message."""
    fill: Callable[[torch.Tensor, int], object]
    """Fills a flat host tensor with the consecutive elements from the given one on, verified and cast to its dtype."""

    def read(self) -> torch.Tensor:
        """Return the full tensor, in its shape and dtype, on the host."""
        full = torch.empty(self.shape, dtype=self.dtype)
        self.fill(full.view(-1), 0)
        return full


class CheckpointFolder:
    """A checkpoint to read: of torchacc, or any Hugging Face one with safetensors, which has no checksums.

    A context manager; everything that is read of a torchacc checkpoint is verified.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the manifest, and where the tensors lie.

        Args:
            path: The folder.

        Raises:
            CheckpointError: There is no checkpoint, or it is not complete, or altered.
        """
        self.path = locate(Path(path))
        self.is_verified = (self.path / MANIFEST).exists()
        self._segments: dict[str, list[Segment]] = {}
        self._files: dict[str, BinaryIO] = {}
        self._close = weakref.finalize(self, _close, self._files)  # also where a load is refused before it is entered
        self._last: tuple[tuple[str, int], bytearray] | None = None
        if self.is_verified:
            self._read_manifest()
        elif (self.path / "state.json").exists() or any(self.path.glob("rank-*.writing")) or is_incomplete(self.path):
            raise CheckpointError(f"{self.path / MANIFEST} is missing: {self._incomplete()}")
        self._regions: dict[str, FileRegion] = {}
        self.model = self._tensors("model")
        """Parameters and buffers, by original name."""
        self.optimizer = self._tensors("optimizer")
        """Optimizer state, by `<parameter name>/<state name>`."""
        self.state = self._tensors("state")
        """Tensors that other states hold."""
        if not self.model:
            raise CheckpointError(self._nothing())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return name in self._segments if self.is_verified else (self.path / name).is_file()

    def read_file(self, name: str) -> bytes:
        """Return all of a file."""
        with self._naming(self.path / name):
            buffer = bytearray((self.path / name).stat().st_size)
        self._read_into(memoryview(buffer), name, 0, name)
        return bytes(buffer)

    def read_json(self, name: str) -> Any:
        """Return what a JSON file says."""
        try:
            return json.loads(self.read_file(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path / name} makes no sense: {error}") from None

    def _stored(self, name: str, region: FileRegion) -> StoredTensor:
        """Return a tensor of the checkpoint, to be read."""

        def fill(target: torch.Tensor, start: int) -> None:
            elements = target if target.dtype == region.dtype else torch.empty(len(target), dtype=region.dtype)
            offset = region.offset + start * region.dtype.itemsize
            self._read_into(as_bytes(elements), region.path.name, offset, name)
            if elements is not target:
                target.copy_(elements)

        return StoredTensor(region.shape, region.dtype, f"{region.path}: {name}", fill)

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
            self._segments[name] = segments = []
            total = 0
            for size, checksum in entry["segments"]:
                segments.append(Segment(total, size, checksum))
                total += size
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path} is not a file: torchacc has not written it")
            if not path.is_file():
                raise CheckpointError(f"{path} is missing: {self._incomplete()}")
            size = path.stat().st_size
            if size != entry["size"] or total != entry["size"]:
                raise CheckpointError(
                    f"{path} has {size:,} bytes, and was written with {entry['size']:,}: {self._incomplete()}"
                )

    def _tensors(self, stem: str) -> dict[str, StoredTensor]:
        index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        name = next((name for name in (single, index) if self.has(name)), None)  # transformers' order
        if name is None:
            return {}
        if self.is_verified and name == index:
            self.read_file(name)
        found = read_regions(self.path / name, self._verified_header if self.is_verified else read_header)
        self._regions |= found
        return {key: self._stored(key, region) for key, region in found.items()}

    def _verified_header(self, path: Path) -> tuple[bytearray, int]:
        """Return a file's header and size: what a wrong offset leads to would be another tensor's bytes, and right."""
        if path.name not in self._segments:
            raise CheckpointError(f"{path} is not of this checkpoint: its {MANIFEST} does not list it")
        segments = self._segments[path.name]
        if not segments:
            raise CheckpointError(f"{path} is empty: it is not a safetensors file")
        header = self._segment(path.name, segments[0], f"header of {path.name}")
        return header, segments[-1].start + segments[-1].size

    def _incomplete(self) -> str:
        return f"the checkpoint is not complete, as where a save or a copy was cut off{hint_of_others(self.path)}"

    def _nothing(self) -> str:
        below = sorted(path.parent.name for path in self.path.glob(f"*/{MANIFEST}"))
        if below:
            return (
                f"{self.path} is not a checkpoint, and holds {len(below)}, the last of which is {below[-1]}: name one, "
                f"as {str(self.path / below[-1])!r}; or let CheckpointManager(folder, model=model, …).restore() load "
                "the newest that is whole"
            )
        nothing = f"{self.path} holds no model.safetensors and no model.safetensors.index.json"
        if any(self.path.glob("*.distcp")):
            return (
                f"{nothing}, but files of torch.distributed.checkpoint: `torchacc convert {self.path} TARGET --to "
                "torchacc` makes a checkpoint of them that can be loaded"
            )
        pickled = sorted(path.name for path in self.path.glob("pytorch_model*.bin"))
        if not pickled:
            return nothing
        return (
            f"{nothing}, only {pickled[0]}, a pickle, which is not loaded: convert it to safetensors, by "
            "from_pretrained() and save_pretrained()"
        )

    @contextmanager
    def _naming(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            gone = "" if self.path.is_dir() else ": the checkpoint was removed while it was read"
            raise CheckpointError(f"{path} cannot be read: {error.strerror}{gone}") from None

    def _read_into(self, target: memoryview, name: str, offset: int, what: str) -> None:
        """Fill memory with a file's bytes from an offset on, of which whole segments go there without a copy."""
        stop = offset + len(target)
        for segment in self._segments_within(name, offset, stop):
            first, last = max(segment.start, offset), min(segment.start + segment.size, stop)
            part = target[first - offset : last - offset]
            if len(part) == segment.size:
                self._fill(part, name, segment, what)
            else:
                part[:] = self._segment(name, segment, what)[first - segment.start : last - segment.start]

    def _segments_within(self, name: str, start: int, stop: int) -> list[Segment]:
        """Return the segments of which a range has bytes; without checksums the range is one."""
        if start == stop:
            return []
        if not self.is_verified:
            return [Segment(start, stop - start, "")]
        segments = self._segments[name]
        starts = attrgetter("start")
        first = bisect_right(segments, start, key=starts) - 1
        return [segment for segment in segments[first : bisect_left(segments, stop, key=starts)] if segment.size]

    def _segment(self, name: str, segment: Segment, what: str | None = None) -> bytearray:
        """Return a verified segment; the last one is kept, as neighbours share it."""
        key = (name, segment.start)
        if self._last is None or self._last[0] != key:
            data = bytearray(segment.size)
            self._fill(memoryview(data), name, segment, what)
            self._last = key, data
        return self._last[1]

    def _fill(self, target: memoryview, name: str, segment: Segment, what: str | None) -> None:
        """Read a segment, and verify it."""
        path = self.path / name
        if name not in self._files:
            with self._naming(path):
                self._files[name] = open_regular(path)
        read_exactly(self._files[name].fileno(), target, segment.start, path)
        if segment.digest and digest(target) != segment.digest:
            raise CheckpointError(
                f"{path} is not as it was written: {what or self._tensor_at(name, segment.start)}, within the bytes "
                f"{segment.start:,} to {segment.start + segment.size:,}. Load another checkpoint"
            )

    def _tensor_at(self, name: str, offset: int) -> str:
        in_file = ((key, region) for key, region in self._regions.items() if region.path.name == name)
        return next((key for key, r in in_file if r.offset <= offset < r.offset + r.nbytes), name)


def _close(files: dict[str, BinaryIO]) -> None:
    while files:
        files.popitem()[1].close()
