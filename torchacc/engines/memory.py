"""How much memory is in use, as plain data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_STATUS = Path("/proc/self/status")


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
