"""What gloo does and has no option for: its reports on standard output, and threads that outlive their collectives."""

import atexit
import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_DRAIN_SECS = 2.0
"""How long the end of a process waits for threads that stay busy."""
_LOOKS = 3
"""How often in a row all threads must be seen asleep: one may have slept because another was at work."""
_TASKS = Path("/proc/self/task")


@contextmanager
def gloo_silenced() -> Iterator[None]:
    """Keep gloo from reporting its connections on standard output, from each rank, each time a group is made.

    Gloo has no option for that. Only C++'s `std::cout` is silenced meanwhile, not what Python prints in other threads.
    """
    say = _cout_state()
    say(_BAD)
    try:
        yield
    finally:
        say(_GOOD)


_GOOD, _BAD = 0, 1
"""States of a C++ stream."""


@functools.cache
def _cout_state() -> Callable[[int], object]:
    """Return what sets the state of C++'s `std::cout`; what does nothing where libstdc++ is not the library of C++."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        clear = library["_ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate"]  # std::ios::clear(iostate)
        cout = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout"))
    except (OSError, AttributeError, ValueError):
        return lambda state: None
    clear.restype, clear.argtypes = None, [ctypes.c_void_p, ctypes.c_int]
    # The virtual base of a stream lies where the third entry before its table of virtual functions says.
    table = ctypes.c_void_p.from_address(cout).value or 0
    offset = ctypes.c_ssize_t.from_address(table - 3 * ctypes.sizeof(ctypes.c_void_p)).value
    return functools.partial(clear, cout + offset)


@functools.cache
def drain_at_exit() -> None:
    """Have the end of this process wait for gloo's threads."""
    atexit.register(_drain)


def _drain() -> None:
    """Wait until gloo's threads have released their last tensors, while they can still take the interpreter's lock.

    A collective is over for its caller before gloo's thread has dropped the tensors, for which it may need the
    interpreter's lock. Python ends a thread that waits for the lock while the interpreter ends, and as this one waits
    in a destructor, that aborts the process: `terminate called without an active exception`
    (https://github.com/pytorch/pytorch/pull/179291). Destroying the group joins its threads only where nothing, such as
    FSDP2 in a model, holds the group any more.
    """
    deadline = time.monotonic() + _DRAIN_SECS
    looks = 0
    while looks < _LOOKS and time.monotonic() < deadline:
        time.sleep(0.005)  # the lock is free meanwhile
        looks = looks + 1 if _others_sleep() else 0


def _others_sleep() -> bool:
    """Return whether every thread but this one waits for something; True where the system does not tell."""
    own = str(threading.get_native_id())
    return all(_sleeps(task) for task in _TASKS.glob("*") if task.name != own)


def _sleeps(task: Path) -> bool:
    try:
        return "State:\tS" in (task / "status").read_text()
    except OSError:  # it has ended
        return True
