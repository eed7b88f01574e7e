"""Whether a job that has failed is started again, and with how many processes."""

from dataclasses import dataclass

from torchacc.launch import messages
from torchacc.launch.options import LaunchOptions, count_gpus

_TRIES = 2
"""How often a run that failed is tried again without having come further: after that it is a bug, not a fault."""


@dataclass(frozen=True)
class Ended:
    """How an attempt has ended."""

    status: int
    """The exit status."""
    step: int = 0
    """How many steps the run had made."""
    is_fault: bool = False
    """Whether another attempt may go better."""


class Restarts:
    """Decides on each attempt after the first."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._num_processes = options.num_processes
        self._num_done = 0
        self._furthest = -1
        self._num_stuck = 0

    def next_size(self, ended: Ended) -> int | None:
        """Return the number of processes of the next attempt, or None for no further one; says which and why."""
        if not ended.is_fault or not self._options.max_restarts:
            return None
        self._num_stuck = 0 if ended.step > self._furthest else self._num_stuck + 1
        self._furthest = max(self._furthest, ended.step)
        if self._num_stuck >= _TRIES:
            messages.say(f"not restarted: {_TRIES} restarts made no progress beyond step {self._furthest}")
            return None
        if self._num_done >= self._options.max_restarts:
            messages.say(f"not restarted: all {self._num_done} restarts are used (--max-restarts)")
            return None
        size = self._size()
        if size is None:
            return None
        self._num_done += 1
        fewer = f" with {size} processes in place of {self._num_processes}" if size < self._num_processes else ""
        messages.say(f"restart {self._num_done} of {self._options.max_restarts}{fewer}, after step {ended.step}")
        self._num_processes = size
        return size

    def _size(self) -> int | None:
        """Return as many as there are devices for; where it did not come further, half."""
        least = self._options.min_processes or self._num_processes
        gpus = count_gpus()
        size = self._num_processes if gpus is None else min(gpus, self._num_processes)
        if size < least:
            messages.say(f"not restarted: {size} GPUs are left, and {least} are needed")
            return None
        is_smaller = size < self._num_processes
        return size if is_smaller or not self._num_stuck else max(least, size // 2)
