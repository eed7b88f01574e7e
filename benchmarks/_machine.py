"""What a benchmark says about the machine that it ran on."""

import importlib.metadata
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

PACKAGES = ("torch", "torch_xla", "transformers")
QUIET_CORES = 0.1  # more work than this beside the benchmark, and its times are not worth quoting


def machine_facts() -> dict[str, Any]:
    """Return what timings depend on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        **{name: _version(name) for name in PACKAGES},
    }


def busy_secs() -> float | None:
    """Return the CPU time that the machine has spent so far on anything; None where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return float(user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def describe_other_work(cores: list[float]) -> str:
    """Return a line on the cores that were busy with what is not the benchmark."""
    usual = median(cores)
    quiet = "" if usual <= QUIET_CORES else ": THE MACHINE WAS NOT QUIET, do not quote these times"
    return f"other work took {usual:.2f} cores (median), {max(cores):.2f} at most{quiet}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
