"""What the launcher says of a job, on standard error."""

import signal
import sys

from torchacc.launch.processes import Process, hostname

_TRACEBACKS = ("Traceback (most recent call last)", "Fatal Python error")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_NUM_LINES = 60


def say(text: str) -> None:
    """Print one message of the launcher's."""
    sys.stderr.write(f"torchacc launch: {text}\n")
    sys.stderr.flush()


def failure(process: Process, output: str | None, *, others: int) -> None:
    """Tell of the process that failed first: what it said of it, and then which it is."""
    if output is not None:
        sys.stderr.write(f"{last_words(output)}\n")
    rest = f", and the {others} other{'s' * (others > 1)} of this node ended with it" if others else ""
    say(f"rank {process.rank} on {hostname()} {how_it_ended(process.status or 0)}{rest}")


def torchrun(log: str) -> None:
    """Tell that torchrun itself failed, before any process."""
    sys.stderr.write(f"{last_words(log)}\n")
    say(f"torchrun failed on {hostname()}")


def how_it_ended(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"failed with exit status {status}"
    name = signal.Signals(-status).name
    if -status == signal.SIGKILL:
        return f"was killed ({name}): by a kill -9, or by the system as memory ran out (see dmesg)"
    return f"was ended by {name}"


def last_words(output: str) -> str:
    """Return the end of what a process printed, from its last traceback on, with what that was chained to."""
    lines = output.rstrip().splitlines()
    start = max(0, len(lines) - _NUM_LINES)
    tracebacks = [index for index, line in enumerate(lines) if line.startswith(_TRACEBACKS)]
    if tracebacks:
        start = tracebacks.pop()
        while tracebacks and start >= 2 and lines[start - 2] in _CHAINED:
            start = tracebacks.pop()
    return "\n".join(lines[start:])
