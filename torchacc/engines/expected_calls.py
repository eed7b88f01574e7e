"""Calls that every process is to make: who waits in one finds out who is elsewhere."""

import itertools
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from torchacc.env import Job
from torchacc.errors import EngineError
from torchacc.launch import progress
from torchacc.logging import OF_THIS_RANK, get_logger

_log = get_logger(__name__)

_LOOK_SECS = 5.0
"""How long a process waits in a call before it looks whether another is in another call."""
_WARN_SECS = 30.0
"""How long it waits before it says who is not there."""
_CALL_SECS = dist.default_pg_timeout.total_seconds()
"""How long it waits at all: as long as PyTorch would in the call's first collective."""
_PAUSE_SECS = 0.1
"""The longest time between two looks whether all are there."""
_MOST_ABSENT = 8
"""How many of the processes that are not there are named."""
_EVERY_PROCESS = "every process has to make this call, in the same order as others, and not under `if rank == 0:`"


def wait_for_all(job: Job, call: str) -> None:
    """Wait until every process has come to the same call, as `ProcessGroup.expect_all()` does."""
    _last.append(_Expected(job, call, _last.pop() if _last else None))
    _last[-1].wait()


def tell_end() -> None:
    """Record that this process comes to no more calls."""
    with suppress(RuntimeError):  # the process that keeps the store has ended before
        _get_default_store().set(_ended(dist.get_rank()), "")


class _Expected:
    """A call that every process is to make, in the store through which the processes have found one another."""

    def __init__(self, job: Job, call: str, before: "_Expected | None") -> None:
        self._job, self._call = job, call
        self._number: int = 0 if before is None else before._number + 1
        self._store = _get_default_store()
        self._count = f"torchacc/call/{self._number}/{call}"
        self._everyone = f"{self._count}/all"
        self._of_before = [] if before is None else [before._count, before._everyone]
        self._began = time.monotonic()

    def wait(self) -> None:
        """Return as soon as all are there."""
        self._store.set(self._key(self._number, self._job.rank), self._call)
        if self._store.add(self._count, 1) == self._job.num_processes:
            self._store.set(self._everyone, "")
            for key in self._of_before:  # which nobody looks at any more, as all are here
                self._store.delete_key(key)
        self._store.delete_key(self._key(self._number - 2, self._job.rank))
        for secs in itertools.chain((_LOOK_SECS, _WARN_SECS), itertools.count(10 * _WARN_SECS, 10 * _WARN_SECS)):
            if self._waited_until(min(secs, _CALL_SECS)):
                return
            self._look(secs)

    def _waited_until(self, secs: float) -> bool:
        """Return whether all have come, or else as soon as so much time has gone by.

        By asking again and again: a wait of the store's own that ends so has C++ report it on the terminal.
        """
        pause = 0.0005
        while not self._store.check([self._everyone]):
            if time.monotonic() - self._began >= secs:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECS)
        return True

    def _look(self, secs: float) -> None:
        """Say who is not there, or is elsewhere."""
        absent: list[int] = []
        for rank in range(self._job.num_processes):
            key = self._key(self._number, rank)
            if not self._store.check([key]):
                if self._store.check([_ended(rank)]):
                    raise EngineError(
                        f"rank {self._job.rank} is in {self._call}, and rank {rank} has ended and not come to it: "
                        f"{_EVERY_PROCESS}"
                    )
                absent.append(rank)
            elif (other := self._store.get(key).decode()) != self._call:
                raise EngineError(
                    f"rank {self._job.rank} is in {self._call}, and rank {rank} in {other}: {_EVERY_PROCESS}"
                )
            if len(absent) > _MOST_ABSENT:
                break
        if not absent or secs < _WARN_SECS:
            return
        listed = ", ".join(map(str, absent[:_MOST_ABSENT])) + (", …" if len(absent) > _MOST_ABSENT else "")
        others = f"rank {listed} has" if len(absent) == 1 else f"ranks {listed} have"
        if secs >= _CALL_SECS:
            raise EngineError(
                f"rank {self._job.rank} has waited {_CALL_SECS:.0f} s in {self._call}, and {others} not come to it: "
                f"{_EVERY_PROCESS}"
            )
        if set(range(self._job.rank)) <= set(absent):  # of those that wait the first one speaks
            _log.warning(
                "rank %d has waited %.0f s in %s, and %s not come to it%s: %s. It waits for %.0f minutes at most",
                self._job.rank,
                secs,
                self._call,
                others,
                self._where(absent),
                _EVERY_PROCESS,
                _CALL_SECS / 60,
                extra=OF_THIS_RANK,
            )

    def _where(self, ranks: Sequence[int]) -> str:
        """Say where the first of these ranks is that a launcher of this machine has started; empty for none."""
        known = ((rank, progress.read_neighbour(self._job, rank)) for rank in ranks)
        return next((f" (rank {rank} is {at.where(time.monotonic())})" for rank, at in known if at is not None), "")

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"torchacc/call/{number}/of/{rank}"


_last: list[_Expected] = []
"""The last one of this process, if it has made any."""


def _ended(rank: int) -> str:
    return f"torchacc/ended/{rank}"
