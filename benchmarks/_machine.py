"""What a benchmark says about the machine that it ran on."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "torch_xla", "transformers", "accelerate", "lightning_fabric")
QUIET_CORES = 0.1  # more work than this beside the benchmark, and its times are not worth quoting


def machine_facts() -> dict[str, Any]:
    """Return what timings depend on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        **{name: _version(name) for name in PACKAGES},
    }


def checkout_environment() -> dict[str, str]:
    """Return the environment in which a process imports the torchacc of this checkout, whatever is installed."""
    environment = dict(os.environ)  # noqa: TID251
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    return environment


def in_turns(cases: Sequence[Any], rounds: int) -> list[Any]:
    """Return the cases once for each round, every second one backwards."""
    return [case for index in range(rounds) for case in (cases if index % 2 == 0 else list(reversed(cases)))]


def run_alone(command: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run Python in a process of its own, and return what it prints as JSON in its last line, and `other_cores`.

    Args:
        command: The file, or other options of Python, and its arguments.
        environment: Variables that are set where the caller's environment has none.
    """
    other_work = OtherWork()
    variables = {**(environment or {}), **checkout_environment()}
    done = subprocess.run([sys.executable, *command], env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.strip().rpartition("\n")[2] or "{}")
    return {**found, "other_cores": other_work.cores()}


class OtherWork:
    """Counts the cores that are busy with what is not the benchmark, from when it is made."""

    def __init__(self) -> None:
        """Note what the machine has spent so far."""
        self._busy, self._children, self._started = _busy_secs(), _children_secs(), time.perf_counter()

    def cores(self, own_secs: float | None = None) -> float | None:
        """Return how many it were on average; None where the system does not tell.

        Args:
            own_secs: The benchmark's CPU time meanwhile; None for that of the processes which it started and which
                have ended.
        """
        busy = _busy_secs()
        if self._busy is None or busy is None:
            return None
        own = _children_secs() - self._children if own_secs is None else own_secs
        return max(0.0, (busy - self._busy - own) / (time.perf_counter() - self._started))


def _children_secs() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _busy_secs() -> float | None:
    """Return the CPU time that the machine has spent so far on anything; None where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return float(user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def median_cores(measured: Iterable[float | None]) -> float | None:
    """Return the median of what `OtherWork.cores()` gave; None where the system did not tell."""
    cores = [each for each in measured if each is not None]
    return median(cores) if cores else None


def _processor() -> str:
    """Return the processor's name; where the system does not tell, only its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
