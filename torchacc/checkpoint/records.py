"""The checksums of what is read from `.pth` files: computed while it is read, in any order, by any thread."""

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torchacc.checkpoint.crc import Crc
from torchacc.checkpoint.interop.pth import Record, Written, joined_checksum, tensor_records
from torchacc.errors import CheckpointError


class Run(NamedTuple):
    """Bytes of a tensor in a file that are to be read."""

    path: Path
    span: range
    name: str
    """The tensor, in messages."""


class RecordChecks:
    """Compares every record of which anything is read with its checksum, as soon as all of it has been read.

    A byte that is read several times is counted once. What of a record nobody reads, such as padding, is in `unread`,
    and has to be read as well.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        """Find the records.

        Raises:
            CheckpointError: A file cannot be read, or has changed since the runs were planned.
        """
        self.counted: list[range] = [range(0)] * len(runs)
        """For each run, which of its bytes are not counted with another one's."""
        self.unread: list[Run] = []
        """What of the records no run reads."""
        self._lock = threading.Lock()
        self._files: dict[Path, _File] = {}
        by_path: defaultdict[Path, list[int]] = defaultdict(list)
        for index, run in enumerate(runs):
            if run.span:
                by_path[run.path].append(index)
        for path, indices in by_path.items():
            self._files[path] = file = _File(path)
            indices.sort(key=lambda index: runs[index].span.start)
            for index in indices:
                self.counted[index] = file.take(runs[index])
            self.unread += file.rest()

    def add(self, path: Path, offset: int, data: memoryview, counted: range) -> None:
        """Count what has been read of a run.

        Args:
            path: The file.
            offset: Where the bytes lie in it.
            data: The bytes.
            counted: Which bytes of the file are counted with this run.

        Raises:
            CheckpointError: It completes a record, whose checksum is wrong.
        """
        first, last = max(offset, counted.start), min(offset + len(data), counted.stop)
        if first >= last:
            return
        record = self._files[path].record_at(first)
        crc = Crc.of(data[first - offset : last - offset])
        with self._lock:
            record.read.append(Written(first, crc))
            record.left -= crc.size
            complete = record.left == 0
        if complete:
            record.check(path)


@dataclass
class _Pending:
    """A record of which a part has been read."""

    of: Record
    left: int
    """Bytes that have not been read yet."""
    next: int
    """The first byte that no run has taken yet."""
    names: set[str] = field(default_factory=set)
    read: list[Written] = field(default_factory=list)

    def check(self, path: Path) -> None:
        start = self.of.start
        if joined_checksum(sorted(self.read, key=lambda run: run.offset), start, start + self.of.size) != self.of.crc:
            raise damaged(path, self.of.name, self.names)
        self.read.clear()


class _File:
    """The records of a file, in order, and which of them are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = [record for record in tensor_records(path) if record.size]
        self._starts = [record.start for record in self._records]
        self._pending: dict[int, _Pending] = {}
        self._skipped: list[Run] = []

    def take(self, run: Run) -> range:
        """Return which bytes of a run no earlier one has; they are taken in order of their first bytes."""
        index = bisect_right(self._starts, run.span.start) - 1
        if index < 0 or run.span.stop > self._starts[index] + self._records[index].size:
            raise CheckpointError(f"{self._path} has been changed while it was read: {run.name} is no longer there")
        record = self._records[index]
        pending = self._pending.setdefault(index, _Pending(record, record.size, record.start))
        pending.names.add(run.name)
        self._skip(pending, run.span.start)
        taken = range(pending.next, max(pending.next, run.span.stop))
        pending.next = taken.stop
        return taken

    def rest(self) -> list[Run]:
        """Return what has not been taken of the records of which something has."""
        for pending in self._pending.values():
            self._skip(pending, pending.of.start + pending.of.size)
        return self._skipped

    def _skip(self, pending: _Pending, stop: int) -> None:
        """Note that no run has the bytes of a record up to `stop` that have not been taken."""
        if pending.next < stop:
            self._skipped.append(Run(self._path, range(pending.next, stop), ", ".join(sorted(pending.names))))
            pending.next = stop

    def record_at(self, offset: int) -> _Pending:
        """Return the record that has a byte."""
        return self._pending[bisect_right(self._starts, offset) - 1]


def damaged(path: Path, record: str, names: Iterable[str]) -> CheckpointError:
    """Return the error of a record whose checksum is wrong."""
    holding = f", which holds {', '.join(sorted(names))}" if names else ""
    return CheckpointError(f"{path} is damaged: the checksum of its record {record}{holding}, is wrong")
