"""How workers of the contract run, and in which environment."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests import forkrun

ROOT = Path(__file__).parents[2]


def environment(*xla_flags: str, **variables: str) -> dict[str, str]:
    """Return the variables, with this checkout and no network, and with more flags of XLA's."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    flags = " ".join([os.environ["XLA_FLAGS"], *xla_flags])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "XLA_FLAGS": flags} | variables


def run_all(
    worker: Path, *arguments: object, num_ranks: int = 0, imports: Sequence[str] = (), seconds: float, **variables: str
) -> str:
    """Run a worker to its end, or until its time is up; return what it printed."""
    try:
        return forkrun.run(
            worker,
            *arguments,
            num_ranks=num_ranks,
            imports=imports,
            env=environment(**variables),
            timeout=seconds,
            merged=True,
        ).stdout
    except subprocess.TimeoutExpired as late:
        return f"{late.output}\n(ended after {seconds} s)"
