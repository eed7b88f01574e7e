"""How far each process of a job is: written by the process itself, read by its launcher.

A record is 32 bytes of a file that the process has mapped into its memory, so that writing it takes no system call.
Without a launcher nothing is written.
"""

import atexit
import faulthandler
import mmap
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import ClassVar

from torchacc import env

FOLDER = "TORCHACC_LAUNCH_FOLDER"
"""The variable by which a launcher tells its processes where to write."""
DUMP_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Lets a process write the Python stack of each of its threads; of the signals that nothing else uses."""

_RECORD = struct.Struct("=qqqd")


class Phase(IntEnum):
    """What a process is at. Within a step in this order."""

    START = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    EVALUATION = 4
    OPTIMIZER = 5
    STEPPED = 6
    SAVING = 7
    LOADING = 8
    FOLLOWING = 9
    ENDING = 10

    @property
    def words(self) -> str:
        """Say where such a process is."""
        return _WORDS[self]


_WORDS = {
    Phase.START: "at the start",
    Phase.DATA: "between the request for a batch and the forward pass",
    Phase.FORWARD: "in the forward pass",
    Phase.BACKWARD: "between the forward pass and the optimizer's step",
    Phase.EVALUATION: "after a forward pass without gradients",
    Phase.OPTIMIZER: "in the optimizer's step",
    Phase.STEPPED: "after the optimizer's step",
    Phase.SAVING: "saving a checkpoint",
    Phase.LOADING: "loading a checkpoint",
    Phase.FOLLOWING: "left by another rank",
    Phase.ENDING: "at its end",
}


@dataclass(frozen=True)
class Progress:
    """How far a process is, as it last wrote."""

    step: int
    """Steps that the run has made, those before a restart included where a checkpoint has them."""
    own_steps: int
    """Steps that this process has made."""
    phase: Phase
    """What it has been at since then."""
    since: float
    """Seconds of `time.monotonic()`, which is one clock for all processes of a machine."""

    def where(self, now: float) -> str:
        """Say where the process is, and since when."""
        secs = now - self.since
        if self.phase < Phase.STEPPED:
            return f"{self.phase.words} of step {self.step + 1} for {secs:.0f} s"
        return f"{self.phase.words}, after step {self.step}, for {secs:.0f} s"


class _ProgressFile:
    active: ClassVar["_ProgressFile | None"] = None
    """That of this process, where a launcher has started it."""

    def __init__(self, folder: Path, local_rank: int) -> None:
        path = record_path(folder, local_rank)
        path.write_bytes(bytes(_RECORD.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._stack = stack_path(folder, local_rank).open("w")
        faulthandler.register(DUMP_SIGNAL, self._stack, all_threads=True)
        self.step = 0
        self.own_steps = 0
        self.phase = Phase.START
        self.write()

    def write(self) -> None:
        _RECORD.pack_into(self._memory, 0, self.step, self.own_steps, self.phase, time.monotonic())


def start() -> None:
    """Begin to write, where there is a launcher."""
    folder = env.get(FOLDER)
    if folder and _ProgressFile.active is None and Path(folder).is_dir():
        _ProgressFile.active = _ProgressFile(Path(folder), env.read_job().local_rank)


def mark(phase: Phase) -> None:
    """Record that this process has come to a phase."""
    file = _ProgressFile.active
    if file is not None:
        file.phase = phase
        file.write()


def stepped() -> None:
    """Record that an optimizer has stepped. Several in a row, with no forward between them, are one step."""
    file = _ProgressFile.active
    if file is None:
        return
    if file.phase == Phase.OPTIMIZER:
        file.step += 1
        file.own_steps += 1
        if file.own_steps == 1:  # late, so that it is among the first at the end
            atexit.register(mark, Phase.ENDING)
    mark(Phase.STEPPED)


def stepping() -> None:
    """Record that an optimizer is about to step."""
    if _ProgressFile.active is not None and _ProgressFile.active.phase != Phase.STEPPED:
        mark(Phase.OPTIMIZER)


def resumed(step: int) -> None:
    """Record how many steps the run had made when it was saved."""
    if _ProgressFile.active is not None:
        _ProgressFile.active.step = step


@contextmanager
def during(phase: Phase) -> Iterator[None]:
    """Context manager for a phase; after it the process is where it was."""
    before = _ProgressFile.active.phase if _ProgressFile.active is not None else phase
    mark(phase)
    try:
        yield
    finally:
        mark(before)


def record_path(folder: Path, local_rank: int) -> Path:
    """Return where a process writes its record."""
    return folder / f"progress-{local_rank}"


def stack_path(folder: Path, local_rank: int) -> Path:
    """Return where a process writes its stack when it is asked to."""
    return folder / f"stack-{local_rank}.txt"


def read_neighbour(job: env.Job, rank: int) -> Progress | None:
    """Return what a rank of this machine last wrote; None without a launcher, and for one of another machine."""
    folder, local_rank = env.get(FOLDER), rank - job.rank + job.local_rank
    return read(Path(folder), local_rank) if folder and 0 <= local_rank < job.local_num_processes else None


def read(folder: Path, local_rank: int) -> Progress | None:
    """Return what a process last wrote; None where it has not begun to."""
    try:
        step, own_steps, phase, since = _RECORD.unpack(record_path(folder, local_rank).read_bytes())
    except (OSError, struct.error):
        return None
    return Progress(step=step, own_steps=own_steps, phase=Phase(phase), since=since) if since else None
