"""Start the processes of a job, watch over them, and end them together."""

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torchacc.launch import options as checks
from torchacc.launch import report
from torchacc.launch.options import LaunchOptions
from torchacc.launch.processes import Processes

_LOOK_SECS = 0.1
_FOLLOW_SECS = 4.0
"""How long processes may go on when one has failed; it is torchrun that asks them to end."""


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
        killed), 143 after SIGTERM, or 130 after Ctrl-C.

    Raises:
        ConfigError: It cannot be started as asked. Nothing has been started.
    """
    options = options or LaunchOptions()
    checks.check(command, options)
    folder = Path(tempfile.mkdtemp(prefix="torchacc-launch-"))
    with _listening() as signals:
        status = _run_once(command, options, folder, signals)
    if status:
        report.say(f"what the processes have printed: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _run_once(command: Sequence[str], options: LaunchOptions, folder: Path, signals: list[int]) -> int:
    processes = Processes(command, options, folder)
    try:
        _watch(processes, options, signals)
    finally:
        processes.kill()
    failed = processes.failed()
    asked = signals[0] if signals else None
    if asked is not None and all(process.ended_by_request for process in failed):
        return 128 + asked if failed or not processes.all_ended_well() else 0
    if failed:
        first = failed[0]
        report.failure(first, processes.output_of(first), others=len(processes.known) - 1)
        return first.exit_status
    if processes.torchrun_status:
        report.torchrun(processes.torchrun_log())
    return processes.torchrun_status


def _watch(processes: Processes, options: LaunchOptions, signals: list[int]) -> None:
    """Return once all has ended, or has to."""
    deadline: float | None = None
    while processes.torchrun_runs():
        time.sleep(_LOOK_SECS)
        processes.look()
        if len(signals) > 1:
            return
        now = time.monotonic()
        if signals:
            if deadline is None:
                report.say(f"{signal.Signals(signals[0]).name}: all processes are asked to save and end; again to kill")
                deadline = now + options.grace_secs
            processes.ask_to_end()
        elif deadline is None and processes.failed():
            deadline = now + _FOLLOW_SECS
        if deadline is not None and now > deadline:
            return
    processes.look()


@contextmanager
def _listening() -> Iterator[list[int]]:
    """Give a list that the signals that ask for the end are added to."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield came
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
