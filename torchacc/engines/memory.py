"""How much memory is in use, as plain data."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchacc import env

_STATUS = Path("/proc/self/status")

# From glibc's malloc.h: one heap for all threads, nothing outside of it, and nothing of it given back.
_M_ARENA_MAX, _M_MMAP_MAX, _M_TRIM_THRESHOLD = -8, -4, -1
_KEEPING = {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1}
_TUNED_BY = (
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
)


@dataclass(frozen=True)
class Memory:
    """The most memory that was in use at once, since the process started."""

    peak_bytes: int
    """Bytes; of several devices, the fullest one's."""
    of: Literal["device", "process"]
    """Whose memory: one device's, or on the CPU all that this process has resident."""


def memory_of_process() -> Memory | None:
    """Return this process's peak of resident memory; None where the system does not tell."""
    # Not resource.getrusage(): its peak is at least that of the program that started this one.
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.exists() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return Memory(int(line.split()[1]) * 1024, "process")
    return None


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for the next step to take.

    As it is, glibc gives large blocks back to the system as a step ends, which then zeroes each of their pages for the
    next one. What is large to PyTorch lies outside of glibc's heap, as does what is large to a thread of XLA's. To be
    called before XLA's runtime starts: a thread stays with the heap that it has.

    Returns:
        Whether it does so from now on: False where the user has tuned glibc, or the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(map(env.get, _TUNED_BY)):
        return False
    return all(mallopt(number, value) for number, value in _KEEPING.items())
