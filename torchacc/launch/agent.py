"""The processes of one attempt on this machine: torchrun's agent starts them, the launcher watches over them.

`torch.distributed.elastic` lets the machines meet, sets each process's variables and sends its output where it belongs.
When an attempt is over, and in which order its processes have ended, is the launcher's to say.
"""

import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, TextIO

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from torchacc import env
from torchacc.launch import progress
from torchacc.launch.hang import RankStatus
from torchacc.launch.options import LaunchOptions
from torchacc.launch.progress import Progress

_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""What a process ends with after SIGTERM; the second is what a `CheckpointManager` exits with."""
USER_ERROR = 2
"""The exit status of a program that was called wrongly, which another attempt does not mend."""
_MEETING_SECS = 900
"""How long torchrun's agent tries to reach the other machines; the launcher gives up before."""
END_SECS = 300.0
"""How long the launcher of a machine that has ended waits for those of others, as with torchrun."""
_PARTING_SECS = 10.0
"""How long the first machine, through which the others meet, waits until all have heard how each has ended."""
_FAILING_SECS = 2.0
"""The same where its own processes have failed: those of others that still run will lose them."""
_POLL_SECS = 0.2
_AGENT_SECS = 10.0
"""How long the agent may take to end when all its processes have."""
_KILL_SECS = 60.0
"""How long a process may take to be gone once it is killed: one that waits for a device may never be."""
_LOCAL_RANK = "${local_rank}"
"""In whose place the agent puts a process's local rank, wherever it is in an argument."""
_STACK_SECS = 2.0
"""How long processes may take to write their stacks."""


@dataclass(eq=False)
class RankProcess:
    """One process of the job."""

    rank: int
    """Its rank among all processes."""
    local_rank: int
    """Its rank among those of this machine."""
    popen: Popen[Any]
    """The process itself."""
    ended: float | None = None
    """When it was seen to have ended, in seconds of `time.monotonic()`."""
    asked_to_end: bool = False
    """Whether it has got SIGTERM."""

    @property
    def status(self) -> int | None:
        """Its exit status, or the negative number of the signal that ended it; None while it runs."""
        return None if self.ended is None else int(self.popen.returncode)

    @property
    def ended_by_request(self) -> bool:
        """Whether it ended as one does that got SIGTERM."""
        return self.status in _ENDED_BY_SIGTERM


@dataclass(frozen=True)
class OtherNodes:
    """How the processes of the other machines have ended, where those of this one have ended well."""

    failed: Sequence[int] = ()
    """Those whose processes have failed."""
    is_fault: bool = False
    """Whether they have failed by what another attempt may mend."""
    running: Sequence[int] = ()
    """Those that had not ended when this one no longer waited for them."""
    are_unknown: bool = False
    """Whether the first machine's launcher has gone before it could be asked."""


class Attempt:
    """The processes of this machine, from their start to their end."""

    def __init__(self, command: Sequence[str], options: LaunchOptions, folder: Path) -> None:
        """Start them, as soon as all machines are there.

        Args:
            command: What each of them runs.
            options: How many there are, and where.
            folder: An empty folder for their output and their progress.
        """
        self.folder = folder
        self.began = time.monotonic()
        """When it began, in seconds of `time.monotonic()`."""
        self.error: str | None = None
        """Why torchrun's agent could not start them, or did not reach the other machines."""
        self._shown = _shown_ranks(options)
        self._lines: dict[RankProcess, _OwnLines] = {}
        self._rendezvous = _check_same_call(options)
        self._agent = _Agent(command, options, folder, self._rendezvous)
        self._thread = threading.Thread(target=self._run, name="torchacc launch", daemon=True)
        self._thread.start()

    @property
    def processes(self) -> list[RankProcess]:
        """All of them; none while the machines wait for one another."""
        return self._agent.processes

    @property
    def num_ranks(self) -> int:
        """How many processes all machines have; 0 while the machines wait for one another."""
        return self._agent.num_ranks

    @property
    def other_nodes(self) -> "OtherNodes":
        """What is known of the other machines, once the processes of this one have ended."""
        return self._agent.other_nodes

    @property
    def uses_torchacc(self) -> bool:
        """Whether a process of this machine has come to `accelerate()`."""
        return any(progress.record_path(self.folder, process.local_rank).exists() for process in self.processes)

    @property
    def running(self) -> list[RankProcess]:
        """Those that have not ended."""
        return [process for process in self.processes if process.status is None]

    @property
    def failed(self) -> list[RankProcess]:
        """Those that did not end well, the first one first; of several at once one that a signal has ended."""
        return _failed(self.processes)

    @property
    def ended_well(self) -> bool:
        """Whether every process has ended with status 0."""
        return bool(self.processes) and all(process.status == 0 for process in self.processes)

    @property
    def progress(self) -> list[Progress]:
        """How far the processes are that run and have said so."""
        found = (progress.read(self.folder, process.local_rank) for process in self.running)
        return [record for record in found if record is not None]

    @property
    def places(self) -> dict[int, Progress]:
        """How far each rank of this machine has said it is, those that have ended included."""
        found = ((process.rank, progress.read(self.folder, process.local_rank)) for process in self.processes)
        return {rank: record for rank, record in found if record is not None}

    @property
    def furthest_step(self) -> int:
        """The largest number of steps that a process has made."""
        return max((record.step for record in self.places.values()), default=0)

    def is_over(self) -> bool:
        """Look which processes have ended, and return whether all have and the other machines know it."""
        now = time.monotonic()
        for process in self.running:
            if process.popen.poll() is not None:
                process.ended = now
        if self.processes and not self.running:
            self._agent.all_ended.set()
        return not self._thread.is_alive()

    def ask_to_end(self) -> None:
        """Send SIGTERM to each process, once."""
        for process in self.running:
            if not process.asked_to_end:
                process.asked_to_end = True
                process.popen.terminate()

    def end(self) -> None:
        """Kill the processes that still run, and what they have started, and end the agent."""
        self._agent.is_abandoned = True
        if self.ended_well:  # the agent may wait for those of other machines
            return
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_SECS
        for process in self.processes:
            with suppress(TimeoutExpired):
                process.popen.wait(max(0.0, deadline - time.monotonic()))
        self.is_over()
        self._thread.join(_AGENT_SECS if self.processes else 0)

    def rank_statuses(self) -> list[RankStatus]:
        """Have the processes write their stacks, and return where each of them is."""
        asked = {p: record for p in self.running if (record := progress.read(self.folder, p.local_rank))}
        for process in asked:
            process.popen.send_signal(progress.DUMP_SIGNAL)
        deadline = time.monotonic() + _STACK_SECS
        stacks: dict[RankProcess, str] = {}
        while True:
            before, stacks = stacks, {p: _text(progress.stack_path(self.folder, p.local_rank)) for p in asked}
            if (all(stacks.values()) and stacks == before) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return [RankStatus(rank=p.rank, progress=record, stack=stacks[p]) for p, record in asked.items()]

    def output_of(self, process: RankProcess) -> str:
        """Return what a process has printed of errors, or else of anything; nothing where only the terminal has it."""
        errors, rest = (_text(_log_path(self.folder, process.rank, stream)) for stream in ("stderr", "stdout"))
        return errors if errors.strip() else rest

    def own_lines(self) -> list[str]:
        """Return what torchacc has said since the last call on ranks that the terminal does not show, of them alone."""
        for process in self.processes:
            if process.local_rank not in self._shown and process not in self._lines:
                self._lines[process] = _OwnLines(_log_path(self.folder, process.rank, "stderr"))
        return [line for lines in self._lines.values() for line in lines.read()]

    def _run(self) -> None:
        try:
            with _log_to(self.folder / "torchrun.log"), _by_lines(sys.stdout):
                self._agent.run()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._rendezvous.shutdown()


class _OwnLines:
    """Lines of a rank's log that say what is so on this rank, as `torchacc.logging` writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0

    def read(self) -> list[str]:
        """Return those that are new."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as file:
            file.seek(self._end)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._end += len(text)
        return [line for line in text.decode(errors="replace").splitlines() if line.startswith("torchacc[")]


def is_fault(process: RankProcess) -> bool:
    """Return whether another attempt may go better than this one, in which a process has failed first."""
    return process.status != USER_ERROR and not process.ended_by_request


def _failed(processes: Sequence[RankProcess]) -> list[RankProcess]:
    failed = [process for process in processes if process.status]
    return sorted(failed, key=lambda process: (process.ended, (process.status or 0) > 0))


class _Agent(LocalElasticAgent):
    """Torchrun's agent, whose processes are over when the launcher says so."""

    def __init__(
        self, command: Sequence[str], options: LaunchOptions, folder: Path, rendezvous: RendezvousHandler
    ) -> None:
        start_rank = str(Path(__file__).with_name("start_rank.py"))
        program = [sys.executable, "-u", *command]
        logs = _Logs(options, folder)
        spec = WorkerSpec(
            role=logs.role,
            local_world_size=options.num_processes,
            rdzv_handler=rendezvous,
            entrypoint=sys.executable,
            args=(*_unchanged(["-I", "-S", start_rank, str(os.getpid())]), _LOCAL_RANK, *_unchanged(program)),
            max_restarts=0,
            monitor_interval=0.01,
            master_addr=_address(options) if options.master_port else None,
            master_port=options.master_port,
        )
        super().__init__(spec, logs, log_line_prefix_template=logs.prefix)
        self.processes: list[RankProcess] = []
        self.num_ranks = 0
        self.all_ended = threading.Event()
        self.other_nodes = OtherNodes()
        self.is_abandoned = False
        """Whether nothing is to be started or waited for any more."""
        self._attempt, self._node_rank, self._num_nodes = folder.name, options.node_rank, options.num_nodes

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the processes, and hand them to the launcher."""
        self._check_abandoned()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        handlers = self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
        self.num_ranks = worker_group.workers[0].world_size
        self.processes = [
            RankProcess(worker.global_rank, worker.local_rank, handlers[worker.local_rank].proc)
            for worker in worker_group.workers
        ]
        self._check_abandoned()  # the agent then ends what it has started
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Wait until the launcher has seen the end of all processes, and those of the other machines have ended."""
        self.all_ended.wait()
        failed = _failed(self.processes)
        if self._num_nodes > 1:
            try:
                self._end_together(failed[0] if failed else None)
            except Exception:  # the store is where the first machine's launcher was
                self.other_nodes = replace(self.other_nodes, are_unknown=True)
        if failed:
            return RunResult(state=WorkerState.FAILED)
        return RunResult(state=WorkerState.SUCCEEDED, return_values={process.rank: None for process in self.processes})

    def _exit_barrier(self) -> None:
        """Do nothing: the machines have waited for one another."""

    def _end_together(self, failed: RankProcess | None) -> None:
        """Tell the other machines how this one has ended, and wait until all have, or one has failed.

        Args:
            failed: The process that has failed first.
        """
        store: Any = self._store
        end = "ended" if failed is None else "failed" if is_fault(failed) else "stopped"
        node, others = self._node_rank, [other for other in range(self._num_nodes) if other != self._node_rank]
        store.set(self._end_of(node), end)
        deadline = time.monotonic() + END_SECS
        while failed is None and not self.is_abandoned:
            ends = {each: store.get(self._end_of(each)) for each in others if store.check([self._end_of(each)])}
            failed_nodes = [each for each, end in ends.items() if end != b"ended"]
            if failed_nodes:
                self.other_nodes = OtherNodes(failed=failed_nodes, is_fault=b"failed" in ends.values())
            elif len(ends) < len(others) and time.monotonic() > deadline:
                self.other_nodes = OtherNodes(running=[each for each in others if each not in ends])
            elif len(ends) < len(others):
                time.sleep(_POLL_SECS)
                continue
            break
        store.set(f"{self._end_of(node)}/known", "")
        if node == 0 and not self.other_nodes.running:
            deadline = time.monotonic() + (_FAILING_SECS if failed is not None else _PARTING_SECS)
            while time.monotonic() < deadline and not store.check([f"{self._end_of(each)}/known" for each in others]):
                time.sleep(_POLL_SECS)

    def _end_of(self, node: int) -> str:
        return f"torchacc/{self._attempt}/end of {node}"

    def _check_abandoned(self) -> None:
        if self.is_abandoned:
            raise InterruptedError("asked to end before all machines were there")


class _Logs(LogsSpecs):
    """Where output goes: `rank-3.stderr.log` and so on, and to the terminal for those that it shows."""

    def __init__(self, options: LaunchOptions, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._shown = _shown_ranks(options)
        self._copies = options.all_ranks or options.log_dir is not None
        # What is copied from a file to the terminal has a prefix; an empty one is that of an empty role.
        self.role = "" if self._copies and not options.all_ranks else "default"
        self.prefix = "[rank ${rank}] " if options.all_ranks else "${role_name}"

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the paths for local ranks, and complete their variables."""
        found = LogsDest()
        for local_rank, variables in envs.items():
            out, errors, error = (
                str(_log_path(self._folder, int(variables["RANK"]), name)) for name in ("stdout", "stderr", "error")
            )
            is_shown = local_rank in self._shown
            to_file = self._copies or not is_shown
            found.stdouts[local_rank], found.stderrs[local_rank] = (out, errors) if to_file else ("", "")
            if is_shown and to_file:
                found.tee_stdouts[local_rank], found.tee_stderrs[local_rank] = out, errors
            found.error_files[local_rank] = variables["TORCHELASTIC_ERROR_FILE"] = error
            variables[progress.FOLDER] = str(self._folder)
            variables["PYTHONFAULTHANDLER"] = env.get("PYTHONFAULTHANDLER") or "1"
            if len(envs) > 1:
                variables.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        return found


def _shown_ranks(options: LaunchOptions) -> range:
    """Return the local ranks whose output the terminal shows."""
    return range(options.num_processes if options.all_ranks else int(options.node_rank == 0))


def _unchanged(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return what the agent, which looks for its names in arguments, makes these of."""
    return tuple(argument.replace("$", "$$") for argument in arguments)


def _check_same_call(options: LaunchOptions) -> RendezvousHandler:
    """Return how the machines find one another; on a single one without a port any that is free is taken."""
    where: dict[str, Any] = {"backend": "c10d", "endpoint": "localhost:0"}
    if options.master_port is not None:
        where = {"backend": "static", "endpoint": f"{_address(options)}:{options.master_port}"}
    return get_rendezvous_handler(
        RendezvousParameters(
            **where,
            run_id=str(uuid.uuid4()) if options.master_port is None else "none",
            min_nodes=options.num_nodes,
            max_nodes=options.num_nodes,
            rank=options.node_rank,
            timeout=_MEETING_SECS,
        )
    )


def _address(options: LaunchOptions) -> str:
    return options.master_addr or "127.0.0.1"


def _log_path(folder: Path, rank: int, stream: str) -> Path:
    return folder / f"rank-{rank}.{stream}.log"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


@contextmanager
def _by_lines(stream: TextIO) -> Iterator[None]:
    """Flush each line that the agent copies, also where it goes to a pipe or a file."""
    if not isinstance(stream, TextIOWrapper) or stream.line_buffering:
        yield
        return
    stream.reconfigure(line_buffering=True)
    try:
        yield
    finally:
        with suppress(OSError):  # of a pipe that nobody reads any more
            stream.reconfigure(line_buffering=False)


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Send to a file what the agent says of itself, so that the last that is printed is the failure."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.FileHandler(path, encoding="utf-8", delay=True), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)
        handler.close()
