"""For tests of hostile input: a context that ends within some seconds and some memory, or fails."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def limited() -> Callable[[float, int], AbstractContextManager[None]]:
    """Return `limited(seconds, nbytes)`, a context."""
    return _limited


@contextmanager
def _limited(seconds: float, nbytes: int) -> Iterator[None]:
    """Fail code that takes longer than this by the clock, or so much more address space than there is now.

    In the main thread only, and for code that starts no threads, which take address space of their own.
    """

    def fail(*_: Any) -> None:
        raise TimeoutError(f"it has taken more than {seconds} s")

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, fail)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)
