"""Read a checkpoint's folder, and verify what is read: see `docs/design/checkpoints.md`."""

import json
import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from typing_extensions import Self

from torchacc.checkpoint.manifest import MANIFEST, Segment, as_bytes, digest, is_incomplete, locate, read_manifest
from torchacc.checkpoint.tensor_files import Slot, read_exactly, read_slots
from torchacc.errors import CheckpointError


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
                self._segment(name, segment)

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
        stop, segments = offset + len(buffer), self._segments[name]
        begin = bisect_right(self._starts[name], offset) - 1
        for index in range(begin, len(segments) if buffer else begin):
            segment = segments[index]
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

    def _segment(self, name: str, segment: Segment, what: str | None = None) -> bytearray:
        """Return a verified segment; the last one is kept, as neighbours share it."""
        key = (name, segment.start)
        if self._last is None or self._last[0] != key:
            data = bytearray(segment.size)
            read_exactly(self._file(name), memoryview(data), segment.start, self.path / name)
            self._check(name, segment, data, what)
            self._last = key, data
        return self._last[1]

    def _check(self, name: str, segment: Segment, data: memoryview | bytearray, what: str | None) -> None:
        if digest(data) != segment.digest:
            what = what or self._tensor_at(name, segment.start)
            raise CheckpointError(
                f"{self.path / name} is not as it was written: {what}, within the bytes {segment.start:,} to "
                f"{segment.start + segment.size:,}. Load another checkpoint"
            )

    def _tensor_at(self, name: str, offset: int) -> str:
        slots = {**self.model, **self.optimizer, **self.state}
        inside = (key for key, s in slots.items() if s.path.name == name and s.offset <= offset < s.offset + s.nbytes)
        return next(inside, name)
