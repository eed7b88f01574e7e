"""Start the processes of a job, watch over them, end them together, and start them again."""

import math
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from types import FrameType

from torchacc.errors import ConfigError
from torchacc.launch import hang, report
from torchacc.launch import options as checks
from torchacc.launch.options import LaunchOptions
from torchacc.launch.processes import Processes, as_exit_status
from torchacc.launch.progress import Phase
from torchacc.launch.restarts import Ended, Restarts

HUNG = 124
"""The exit status of a job that did not get on, as that of `timeout`."""
USER_ERROR = 2
"""The exit status of a program that was called wrongly, which another attempt does not mend."""

_LOOK_SECS = 0.1
_FOLLOW_SECS = 4.0
"""How long processes may go on when one has failed; it is torchrun that asks them to end."""
_PORT_SECS = 20.0


def run(command: Sequence[str], options: LaunchOptions | None = None) -> int:
    """Run a program in several processes, and wait for their end.

    The processes of a node end together: when one fails, by an exception, a signal or the system, the others are ended
    within seconds, and the traceback of the one that was first is printed, with its rank and host. SIGTERM, SIGHUP and
    Ctrl-C are passed on as SIGTERM, so that a `CheckpointManager` saves; the second one kills. The terminal shows rank
    0. The processes end when this one does.

    Args:
        command: What to run in each process: a Python script, or `-m` and a module; and its arguments.
        options: How many processes, and where; None for one.

    Returns:
        An exit status: 0, that of the process that failed first (128 and the signal's number for one that was
        killed), 124 for a job that hung, 143 after SIGTERM, 130 after Ctrl-C.

    Raises:
        ConfigError: It cannot be started as asked. Nothing has been started.
    """
    options = options or LaunchOptions()
    checks.check(command, options)
    folder = _make_folder(options)
    with _listening() as signals:
        status = _run_attempts(command, options, folder, signals)
    if status or options.log_dir is not None:
        report.say(f"what the processes have printed: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _make_folder(options: LaunchOptions) -> Path:
    prefix = "torchacc-launch-"
    if options.log_dir is not None:
        prefix = time.strftime(f"%Y%m%d-%H%M%S-node{options.node_rank}-")
    try:
        if options.log_dir is not None:
            Path(options.log_dir).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=options.log_dir)).absolute()
    except OSError as error:
        raise ConfigError(f"log_dir = {str(options.log_dir)!r} cannot be written: {error}") from None


def _run_attempts(command: Sequence[str], options: LaunchOptions, folder: Path, signals: list[int]) -> int:
    restarts = Restarts(options)
    attempt = 0
    while True:
        place = folder / f"attempt-{attempt}"
        place.mkdir()
        ended = _run_once(command, options, place, signals)
        size = None if signals else restarts.next_size(ended)
        if size is None:
            return ended.status
        options = replace(options, num_processes=size)
        attempt += 1
        _await_closed_port(options)


class _Reason(Enum):
    """Why an attempt is over, or soon to be."""

    ENDED = auto()
    """By itself."""
    ASKED = auto()
    """By a signal to the launcher."""
    FAILED = auto()
    """A process has failed."""
    HUNG = auto()
    """No process gets on."""
    LEFT = auto()
    """The processes have lost one of another node."""


def _run_once(command: Sequence[str], options: LaunchOptions, folder: Path, signals: list[int]) -> Ended:
    oom_kills = report.count_oom_kills()
    processes = Processes(command, options, folder)
    try:
        reason = _watch(processes, options, signals)
        if reason is _Reason.HUNG:
            report.hang(processes.standings(), is_alone=options.num_nodes == 1)
        failed = processes.failed  # before others fail because they are killed
    finally:
        processes.kill()
    step = processes.furthest_step
    if signals and all(process.ended_by_request for process in failed):
        return Ended(0 if processes.ended_well else as_exit_status(-signals[0]))
    if reason is _Reason.HUNG:
        return Ended(HUNG, step, is_fault=True)
    if failed:
        first = failed[0]
        is_shown = options.node_rank == first.local_rank == 0 and not options.all_ranks
        output = "" if is_shown else processes.output_of(first)
        report.failure(first, output, is_out_of_memory=report.count_oom_kills() > oom_kills)
        return Ended(first.exit_status, step, is_fault=first.status != USER_ERROR and not first.ended_by_request)
    if reason is _Reason.LEFT:
        report.left()
        return Ended(1, step, is_fault=True)
    status = processes.torchrun_status
    if status:
        report.torchrun(processes.torchrun_log, status)
    return Ended(as_exit_status(status), step, is_fault=status < 0)


def _watch(processes: Processes, options: LaunchOptions, signals: list[int]) -> _Reason:
    """Return once all has ended, or has to."""
    reason, deadline = _Reason.ENDED, math.inf
    while processes.torchrun_runs:
        time.sleep(_LOOK_SECS)
        processes.look()
        now = time.monotonic()
        if len(signals) > 1 or now > deadline:
            return reason
        if signals:
            if reason is not _Reason.ASKED:
                reason, deadline = _Reason.ASKED, now + options.grace_secs
                report.say(f"{signal.Signals(signals[0]).name}: all processes are asked to save and end; again to kill")
            processes.ask_to_end()
        elif reason is _Reason.ENDED:
            reason = _trouble(processes, options, now)
            if reason is not _Reason.ENDED:
                deadline = now + (0 if reason is _Reason.HUNG else _FOLLOW_SECS)
    processes.look()
    return reason


def _trouble(processes: Processes, options: LaunchOptions, now: float) -> _Reason:
    if processes.failed:
        return _Reason.FAILED
    if options.num_nodes > 1 and any(record.phase is Phase.FOLLOWING for record in processes.records):
        return _Reason.LEFT
    if options.heartbeat_secs is not None and hang.is_stuck(processes.records, now, options.heartbeat_secs):
        return _Reason.HUNG
    return _Reason.ENDED


def _await_closed_port(options: LaunchOptions) -> None:
    """Wait, before this node joins another attempt, until node 0 has ended the last one."""
    if options.node_rank == 0 or options.master_addr is None or options.master_port is None:
        return
    deadline = time.monotonic() + _PORT_SECS
    while time.monotonic() < deadline:
        try:
            socket.create_connection((options.master_addr, options.master_port), timeout=1.0).close()
        except OSError:
            return
        time.sleep(_LOOK_SECS)


@contextmanager
def _listening() -> Iterator[list[int]]:
    """Give a list that the signals that ask for the end are added to."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    asking = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    heard = [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]  # as under `nohup`
    previous = {number: signal.signal(number, note) for number in heard}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
