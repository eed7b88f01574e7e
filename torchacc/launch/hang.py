"""Find the process that hangs, when none makes progress."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchacc.launch.progress import Phase, Progress

_FRAME = re.compile(r'^ +File "(.*)", line \d+ in \S+', re.MULTILINE)
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_COLLECTIVES = re.compile(
    r"/torch/distributed/(?!elastic/|run\.py)|/torchacc/engines/(.+/)?(process_group|expected_calls|\w*collectives)\."
)
"""Files whose functions wait for other processes: PyTorch's, and of each engine those named after collectives."""
_NUM_FRAMES = 4
"""How many frames above a collective PyTorch itself may add: decorators, and operators that wait."""


@dataclass(frozen=True)
class RankStatus:
    """Where a process is while no process makes progress."""

    rank: int
    """Its rank."""
    progress: Progress
    """How far it is."""
    stack: str
    """The Python stack of its threads; empty where it gave none, as when it is stopped."""

    @property
    def waits_for_others(self) -> bool:
        """Whether one of its threads is inside of a collective."""
        return any(_in_collective(thread) for thread in _THREAD.split(self.stack))


def is_stuck(records: Sequence[Progress], now: float, limit_secs: float) -> bool:
    """Return whether no process has come further for so long, and at least one has made its first step before.

    One that is at its end is not waited for.
    """
    going = [record for record in records if record.phase is not Phase.ENDING]
    return any(r.own_steps for r in going) and all(now - record.since > limit_secs for record in going)


def are_apart(records: Iterable[Progress]) -> bool:
    """Return whether processes that go on are in different steps, or parts of one."""
    return len({(record.step, record.phase) for record in records if record.phase is not Phase.ENDING}) > 1


def find_hung_rank(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """Return the process that the others wait for; None where each waits for others.

    It is in no collective. Of several it is the one that is the least far, and there for the longest.
    """
    free = [status for status in statuses if not status.waits_for_others]
    return min(free, key=lambda s: (s.progress.step, s.progress.phase, s.progress.since), default=None)


def describe(status: RankStatus, host: str, now: float) -> str:
    """Say where a process is, and since when."""
    return f"rank {status.rank} on {host} has been {status.progress.where(now)}"


def _in_collective(thread: str) -> bool:
    return any(_COLLECTIVES.search(path) for path in _FRAME.findall(thread)[:_NUM_FRAMES])
