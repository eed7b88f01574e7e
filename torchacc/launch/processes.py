"""The processes of one attempt, as the launcher sees them."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchacc import env
from torchacc.launch.options import LaunchOptions

_HERE = Path(__file__).parent
_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""What a process ends with after SIGTERM; the second is what a `CheckpointManager` exits with."""
_TORCHRUN_SECS = 10.0
"""How long torchrun may take to end when all its processes have."""


@dataclass(frozen=True)
class Process:
    """One process of the job."""

    rank: int
    """Its rank among all processes."""
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
        return 128 - self.status if (self.status or 0) < 0 else self.status or 0  # type: ignore[operator]

    @property
    def ended_by_request(self) -> bool:
        """Whether it ended as one does that got SIGTERM."""
        return self.status in _ENDED_BY_SIGTERM


class Processes:
    """Those of this node, started by torchrun."""

    def __init__(self, command: Sequence[str], options: LaunchOptions, folder: Path) -> None:
        self.folder = folder
        self.known: dict[int, Process] = {}
        """By local rank, as soon as it runs."""
        self._first_rank = options.node_rank * options.num_processes
        self._num = options.num_processes
        self._asked: set[int] = set()
        job = {
            "command": [sys.executable, "-u", *command],
            "first_rank": self._first_rank,
            "on_terminal": [0] if options.node_rank == 0 else [],
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        self._torchrun = subprocess.Popen(
            [
                *(sys.executable, str(_HERE / "start_torchrun.py"), str(folder), str(os.getpid())),
                *_torchrun_arguments(options),
                *(sys.executable, "-I", "-S", str(_HERE / "start_rank.py"), str(folder), "${local_rank}"),
            ],
            env=env.for_child(PYTHONFAULTHANDLER=env.get("PYTHONFAULTHANDLER") or "1"),
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which asks them to save
        )

    @property
    def torchrun_status(self) -> int:
        """Return torchrun's own exit status, once it has ended."""
        return self._torchrun.wait()

    def torchrun_runs(self) -> bool:
        """Return whether torchrun runs; its processes end before it does."""
        return self._torchrun.poll() is None

    def torchrun_log(self) -> str:
        """Return what torchrun has said."""
        path = self.folder / "torchrun.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def look(self) -> None:
        """Read anew what is known of each process."""
        for local_rank in range(self._num):
            path = self.folder / f"local-rank-{local_rank}.json"
            if path.is_file():
                facts = json.loads(path.read_text(encoding="utf-8"))
                self.known[local_rank] = Process(rank=self._first_rank + local_rank, **facts)

    def failed(self) -> list[Process]:
        """Return the processes that did not end well, the first one first."""
        return sorted((p for p in self.known.values() if p.status), key=lambda process: process.ended or 0.0)

    def all_ended_well(self) -> bool:
        """Return whether every process has ended with status 0."""
        return len(self.known) == self._num and all(process.status == 0 for process in self.known.values())

    def ask_to_end(self) -> None:
        """Send SIGTERM to each process, once."""
        if not self.known and self._torchrun.pid not in self._asked:
            self._asked.add(self._torchrun.pid)
            self._torchrun.terminate()
        for process in self.known.values():
            if process.status is None and process.pid not in self._asked:
                self._asked.add(process.pid)
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End at once whatever still runs."""
        for process in self.known.values():
            if process.status is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.keeper, signal.SIGKILL)
        try:
            self._torchrun.wait(_TORCHRUN_SECS if self.known else 0)
        except subprocess.TimeoutExpired:
            self._torchrun.kill()  # with it the kernel ends what it has started
            self._torchrun.wait()

    def output_of(self, process: Process) -> str | None:
        """Return what a process has printed; None where it went to the terminal."""
        path = self.folder / f"rank-{process.rank}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def hostname() -> str:
    """Return this machine's name."""
    return socket.gethostname()


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
