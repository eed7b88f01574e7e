"""Start the processes of a job, watch over them, end them together, and start them again."""

import itertools
import math
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torchacc.errors import ConfigError
from torchacc.launch import hang, messages
from torchacc.launch import options as checks
from torchacc.launch.options import LaunchOptions
from torchacc.launch.progress import Phase
from torchacc.launch.restarts import Ended, Restarts

if TYPE_CHECKING:  # imports torch
    from torchacc.launch.agent import Attempt

HUNG = 124
"""The exit status of a job that did not get on, as that of `timeout`."""

_LOOK_SECS = 0.05
_APART_SECS = 60.0
"""How long ranks may stay at different places before that is said."""
_STILL_SECS = 240.0
"""How long they may stay at one."""
_WAIT_SECS = (5.0, 30.0)
"""How long a node waits for others before it says so, and says so again; then twice as long each time."""
_MEETING_SECS = 600.0
"""How long it waits at all."""
_READ_SECS = 1.0
"""How often it looks at what ranks say that the terminal does not show."""
_UNUSED_SECS = 300.0
"""How long processes may run, and prepare their data, before the launcher says that none has called `accelerate()`."""
_FOLLOW_SECS = 4.0
"""How long processes that are asked to end may go on when one has failed."""
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
    if options.log_dir is not None or (status and any(folder.glob("attempt-*/*-*"))):
        messages.say(f"what the processes have printed: {folder}")
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
    SIGNALLED = auto()
    """By a signal to the launcher."""
    FAILED = auto()
    """A process has failed."""
    HUNG = auto()
    """No process gets on."""
    PEER_LOST = auto()
    """The processes have lost one of another node."""
    PEERS_MISSING = auto()
    """The other nodes have not come."""


def _run_once(command: Sequence[str], options: LaunchOptions, folder: Path, signals: list[int]) -> Ended:
    from torchacc.launch.agent import END_SECS, Attempt, is_fault

    oom_kills = messages.count_oom_kills()
    attempt = Attempt(command, options, folder)
    try:
        reason = _watch(attempt, options, signals)
        if reason is _Reason.HUNG:
            messages.hang(attempt.rank_statuses(), is_alone=options.num_nodes == 1)
        failed, places = attempt.failed, attempt.places  # before others fail because they are killed
        gone = [process.rank for process in attempt.processes if process.status == 0]
    finally:
        attempt.end()
    step = attempt.furthest_step
    if signals and all(process.ended_by_request for process in failed):
        return Ended(0 if attempt.ended_well else _as_exit_status(-signals[0]))
    if reason is _Reason.HUNG:
        return Ended(HUNG, step, is_fault=True)
    if failed:
        first, status = failed[0], failed[0].status or 0
        is_shown = options.node_rank == first.local_rank == 0 and not options.all_ranks
        output = "" if is_shown else attempt.output_of(first)
        is_out_of_memory = messages.count_oom_kills() > oom_kills
        messages.failure(first.rank, status, output, gone=gone, is_out_of_memory=is_out_of_memory)
        if status == -signal.SIGABRT and hang.are_apart(places.values()):
            messages.diverged(places, "the ranks may have been in different collectives")
        return Ended(_as_exit_status(status), step, is_fault=is_fault(first))
    if reason is _Reason.PEER_LOST:
        messages.peer_lost()
        return Ended(1, step, is_fault=True)
    others = attempt.other_nodes
    if others.failed:
        messages.failed_elsewhere(others.failed)
        return Ended(1, step, is_fault=others.is_fault)
    if reason is _Reason.PEERS_MISSING:
        messages.peers_missing(options, _MEETING_SECS)
        return Ended(1, step)
    if others.are_unknown:
        messages.without_first()
    if others.running:
        messages.still_running(others.running, END_SECS)
    if attempt.error is not None:
        messages.not_started(attempt.error)
    return Ended(0 if attempt.error is None else 1, step)


def _watch(attempt: "Attempt", options: LaunchOptions, signals: list[int]) -> _Reason:
    """Return why the attempt is over, once all processes have ended or have to."""
    reason, deadline = _Reason.ENDED, math.inf
    notices = _Notices(attempt, options)
    while not attempt.is_over():
        now = time.monotonic()
        notices.look(now)
        if len(signals) > 1 or now > deadline or (signals and not attempt.running):
            return reason
        if signals and reason is not _Reason.SIGNALLED:
            reason, deadline = _Reason.SIGNALLED, now + options.grace_secs
            messages.say(f"{signal.Signals(signals[0]).name}: all processes are asked to save and end; again to kill")
        elif reason is _Reason.ENDED:
            reason = _trouble(attempt, options, now)
            if reason is not _Reason.ENDED:
                deadline = now + (0 if reason in (_Reason.HUNG, _Reason.PEERS_MISSING) else _FOLLOW_SECS)
        if reason in (_Reason.SIGNALLED, _Reason.FAILED):
            attempt.ask_to_end()
        time.sleep(_LOOK_SECS)
    if reason is _Reason.ENDED and attempt.processes:
        notices.look(math.inf)
    return reason


class _Notices:
    """What a user may not expect of a job that runs."""

    def __init__(self, attempt: "Attempt", options: LaunchOptions) -> None:
        self._attempt, self._options = attempt, options
        self._read = attempt.began
        self._said: set[Callable[..., None]] = set()
        self._waits = itertools.chain(_WAIT_SECS, (_WAIT_SECS[-1] * 2**power for power in itertools.count(1)))
        self._next_wait = next(self._waits)

    def look(self, now: float) -> None:
        """Say what there is to say now; at the end of the attempt, `now` is infinite."""
        attempt, options, secs = self._attempt, self._options, now - self._attempt.began
        if now - self._read > _READ_SECS:
            self._read = now
            messages.pass_on(attempt.own_lines())
            self._look_for_stop(now)
        if options.num_nodes > 1 and not attempt.processes and secs > self._next_wait:
            self._next_wait = next(self._waits)
            messages.waiting(options, secs)
        if not attempt.processes or attempt.failed:
            return
        if options.node_rank > 0:
            self._say(messages.started, options.node_rank, [p.rank for p in attempt.processes], attempt.num_ranks)
        if attempt.num_ranks != options.num_processes * options.num_nodes:
            self._say(messages.uneven, options.num_processes, options.num_nodes, attempt.num_ranks)
        several = attempt.num_ranks > 1 and options.node_rank == 0 and not attempt.other_nodes.failed
        if several and secs > _UNUSED_SECS and not attempt.uses_torchacc:
            self._say(messages.not_used)

    def _look_for_stop(self, now: float) -> None:
        """Say where the ranks are that run where none has gone on for long."""
        records = self._attempt.progress
        limit = _APART_SECS if hang.are_apart(records) else _STILL_SECS
        if math.isfinite(now) and hang.is_stuck(records, now, limit):
            found = f"no rank has gone on for {limit:.0f} s (--heartbeat-secs ends such a job)"
            self._say(messages.diverged, self._attempt.places, found)

    def _say(self, message: Callable[..., None], *given: object) -> None:
        """Say a message, once."""
        if message not in self._said:
            self._said.add(message)
            message(*given)


def _as_exit_status(status: int) -> int:
    """Return the exit status that a shell gives for a process that a signal with a negative number has ended."""
    return status if status >= 0 else 128 - status


def _trouble(attempt: "Attempt", options: LaunchOptions, now: float) -> _Reason:
    if attempt.failed:
        return _Reason.FAILED
    if options.num_nodes > 1 and not attempt.processes and now - attempt.began > _MEETING_SECS:
        return _Reason.PEERS_MISSING
    if options.num_nodes > 1 and any(record.phase is Phase.FOLLOWING for record in attempt.progress):
        return _Reason.PEER_LOST
    if options.heartbeat_secs is not None and hang.is_stuck(attempt.progress, now, options.heartbeat_secs):
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
    """Context manager with a list, to which signals that ask the job to end are added."""
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
