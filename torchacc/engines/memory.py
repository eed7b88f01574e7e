"""How much memory is in use, as plain data."""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchacc import env

_STATUS = Path("/proc/self/status")

# From glibc's malloc.h, and the largest threshold that it knows.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_MMAP_THRESHOLD = 32 << 20
_TUNED_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES")


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
    """Keep freed memory in this process for the next step, in blocks of up to 32 MB.

    As it is, glibc gives memory back to the system at the end of a step, which then zeroes each page of it for the next
    one, and more or less of it as the blocks happen to lie. For the process as a whole, as there is one heap.

    Returns:
        Whether it does so from now on: False where the user has tuned glibc, or the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(map(env.get, _TUNED_BY)):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
