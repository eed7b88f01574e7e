"""The processes of one attempt, as the launcher sees them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torchacc import env
from torchacc.launch import progress
from torchacc.launch.hang import Standing
from torchacc.launch.options import LaunchOptions
from torchacc.launch.progress import Record

_HERE = Path(__file__).parent
_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""What a process ends with after SIGTERM; the second is what a `CheckpointManager` exits with."""
_TORCHRUN_SECS = 10.0
"""How long torchrun may take to end when all its processes have."""
_STACK_SECS = 2.0
"""How long processes may take to write their stacks."""


@dataclass(frozen=True)
class Process:
    """One process of the job."""

    rank: int
    """Its rank among all processes."""
    local_rank: int
    """Its rank among those of this node."""
    keeper: int
    """The process that watches over it, whose process group both are in."""
    pid: int
    """Its own process id."""
    status: int | None
    """Its exit status, or the negative number of the signal that ended it; None while it runs."""
    ended: float | None
    """When it ended, in seconds of `time.time()`."""

    @property
    def exit_status(self) -> int:
        """Its exit status as a shell gives it."""
        return as_exit_status(self.status or 0)

    @property
    def ended_by_request(self) -> bool:
        """Whether it ended as one does that got SIGTERM."""
        return self.status in _ENDED_BY_SIGTERM


class Processes:
    """Those of this node, started by torchrun."""

    def __init__(self, command: Sequence[str], options: LaunchOptions, folder: Path) -> None:
        """Start them.

        Args:
            command: What each of them runs.
            options: How many there are, and where.
            folder: An empty folder for what is to be known of this attempt.
        """
        self.folder = folder
        self.known: dict[int, Process] = {}
        """By local rank, as soon as it runs."""
        self._first_rank = options.node_rank * options.num_processes
        self._num = options.num_processes
        self._asked: set[int] = set()
        self._last_look = time.time()
        shown = range(self._num) if options.all_ranks else [0] if options.node_rank == 0 else []
        job = {
            "command": [sys.executable, "-u", *command],
            "first_rank": self._first_rank,
            "shown": list(shown),
            "prefixes": options.all_ranks,
            "copies": options.log_dir is not None,
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        variables = {progress.FOLDER: str(folder), "PYTHONFAULTHANDLER": env.get("PYTHONFAULTHANDLER") or "1"}
        self._torchrun = subprocess.Popen(
            [
                *(sys.executable, str(_HERE / "start_torchrun.py"), str(folder), str(os.getpid())),
                *_torchrun_arguments(options),
                *(sys.executable, "-I", "-S", str(_HERE / "start_rank.py"), str(folder), "${local_rank}"),
            ],
            env=env.for_child(**variables),
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which asks them to save
        )

    @property
    def torchrun_status(self) -> int:
        """Torchrun's own exit status; waits for it."""
        return self._torchrun.wait()

    @property
    def torchrun_runs(self) -> bool:
        """Whether torchrun runs; its processes end before it does."""
        return self._torchrun.poll() is None

    @property
    def torchrun_log(self) -> str:
        """What torchrun itself has said."""
        return _text(self.folder / "torchrun.log")

    @property
    def failed(self) -> list[Process]:
        """The processes that did not end well, the first one first."""
        return sorted((p for p in self.known.values() if p.status), key=lambda process: process.ended or 0.0)

    @property
    def ended_well(self) -> bool:
        """Whether every process has ended with status 0."""
        return len(self.known) == self._num and all(process.status == 0 for process in self.known.values())

    @property
    def records(self) -> list[Record]:
        """How far the processes are that run and have said so."""
        found = (progress.read(self.folder, p.local_rank) for p in self.known.values() if p.status is None)
        return [record for record in found if record is not None]

    @property
    def furthest_step(self) -> int:
        """The largest number of steps that a process has made."""
        found = (progress.read(self.folder, local_rank) for local_rank in range(self._num))
        return max((record.step for record in found if record is not None), default=0)

    def look(self) -> None:
        """Read anew what is known of each process."""
        last_look, self._last_look = self._last_look, time.time()
        for local_rank in range(self._num):
            known = self.known.get(local_rank)
            if known is not None and known.status is not None:
                continue
            found = self._read(local_rank)
            if found is not None and found.status is None and not _exists(found.keeper):
                found = self._read(local_rank)  # again: the last that a keeper does is to write
                if found is not None and found.status is None:  # the kernel has ended its process
                    found = replace(found, status=-signal.SIGKILL, ended=last_look)  # before what followed from it
            if found is not None:
                self.known[local_rank] = found

    def ask_to_end(self) -> None:
        """Send SIGTERM to each process, once."""
        if not self.known and self._torchrun.pid not in self._asked:
            self._asked.add(self._torchrun.pid)
            self._torchrun.terminate()
        for process in self._running():
            if process.pid not in self._asked:
                self._asked.add(process.pid)
                _send(process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End at once whatever still runs."""
        for process in self._running():
            with suppress(ProcessLookupError):
                os.killpg(process.keeper, signal.SIGKILL)
        try:
            self._torchrun.wait(_TORCHRUN_SECS if self.known else 0)
        except subprocess.TimeoutExpired:
            self._torchrun.kill()  # with it the kernel ends what it has started
            self._torchrun.wait()

    def standings(self) -> list[Standing]:
        """Have the processes write their stacks, and return where each of them stands."""
        asked = {p: record for p in self._running() if (record := progress.read(self.folder, p.local_rank))}
        for process in asked:
            _send(process.pid, progress.DUMP_SIGNAL)
        deadline = time.monotonic() + _STACK_SECS
        stacks: dict[Process, str] = {}
        while True:
            before, stacks = stacks, {p: _text(progress.stack_path(self.folder, p.local_rank)) for p in asked}
            if (all(stacks.values()) and stacks == before) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return [Standing(rank=p.rank, record=record, stack=stacks[p]) for p, record in asked.items()]

    def output_of(self, process: Process) -> str:
        """Return what a process has printed; nothing where that went to the terminal alone."""
        return _text(self.folder / f"rank-{process.rank}.log")

    def _read(self, local_rank: int) -> Process | None:
        path = self.folder / f"local-rank-{local_rank}.json"
        if not path.is_file():
            return None
        facts = json.loads(path.read_text(encoding="utf-8"))
        return Process(rank=self._first_rank + local_rank, local_rank=local_rank, **facts)

    def _running(self) -> list[Process]:
        return [process for process in self.known.values() if process.status is None]


def as_exit_status(status: int) -> int:
    """Return the exit status that a shell gives for a process that a signal with a negative number has ended."""
    return status if status >= 0 else 128 - status


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _torchrun_arguments(options: LaunchOptions) -> list[str]:
    arguments = [f"--nproc-per-node={options.num_processes}", "--no-python", "--max-restarts=0"]
    if options.master_port is None:
        return ["--standalone", *arguments]
    address = options.master_addr or "127.0.0.1"
    return [
        *arguments,
        *(f"--nnodes={options.num_nodes}", f"--node-rank={options.node_rank}"),
        *(f"--master-addr={address}", f"--master-port={options.master_port}"),
    ]
