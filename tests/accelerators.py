"""What tests of GPUs and of TPUs have in common: the program that they run, and what an issue about it should say."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests import forkrun

PROGRAM = Path(__file__).with_name("accelerator_program.py")
RELATIVE = 1e-5
SECONDS = 400
GIVEN_FLAGS = "TORCHACC_TEST_GIVEN_XLA_FLAGS"
"""The variable with what `XLA_FLAGS` was before the tests chose those for a CPU."""

Report = Callable[[str, object], None]
"""pytest's `record_property`. What is recorded as `report` is listed when the tests have run: see tests/conftest.py."""


def train(
    backend: str, count: int, out: Path, environment: Mapping[str, str], *options: str, processes: int = 1
) -> dict[str, Any]:
    """Run the program, and return what it has found.

    Args:
        backend: `reference`, which is the unsharded CPU, `native` or `xla`.
        count: On how many devices.
        out: Where it writes that.
        environment: In which a process finds the devices.
        options: Of the program.
        processes: How many there are.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), str(PROGRAM), backend, str(count), str(out), *options],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def environment() -> dict[str, str]:
    """Return the environment of a process as it was before the tests chose XLA's flags for a CPU."""
    return forkrun.environment() | {"XLA_FLAGS": forkrun.environment().get(GIVEN_FLAGS, "")}


def difference(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the largest relative difference between two runs' losses, gradient norms and weights."""
    pairs = [*zip(found["losses"], reference["losses"], strict=True)]
    pairs += zip(found["norms"], reference["norms"], strict=True)
    pairs += [(value, reference["weights"][name]) for name, value in found["weights"].items()]
    return max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)


def fingerprint(weight: torch.Tensor) -> float:
    """Return a number that says which element has which size."""
    sizes = weight.detach().cpu().double().abs().flatten()
    return float(sizes @ torch.linspace(1, 2, len(sizes), dtype=torch.float64))


def compare(found: dict[str, Any], reference: dict[str, Any], report: Report, name: str) -> None:
    """Check that a run has the losses, norms and weights of the reference, and note what an issue should say of it."""
    first, *others = found["seconds"]
    report(
        "report",
        f"{name}: {found.get('kind')}, largest relative difference from the CPU {difference(found, reference):.1e}, "
        f"first step {first:.1f} s, then {sum(others) / len(others) * 1e3:.1f} ms",
    )
    assert len(set(reference["losses"])) == len(found["losses"])
    assert difference(found, reference) < RELATIVE
