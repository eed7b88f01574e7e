"""Find out which engines can run on this machine, in processes of their own: no device is held here."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from torchacc.engines import registry
from torchacc.errors import ConfigError, EngineError

_SECS = 120.0
"""How long an engine may take to find its devices; loading torch_xla alone takes up to 20 s on a busy machine."""

_PROGRAM = "from torchacc.engines import survey; survey.answer({kind!r})"


@dataclass(frozen=True)
class Finding:
    """What became of one engine."""

    kind: str
    devices: str | None
    """What it would run on; None where it cannot run."""
    reason: str | None
    """Why it cannot; None where it can."""


def survey(timeout_secs: float = _SECS) -> list[Finding]:
    """Let each engine look for its devices, and return what it found.

    Args:
        timeout_secs: How long each may take.
    """
    asked: dict[Callable[[], str], tuple[str | None, str | None]] = {}
    findings = []
    for kind in registry.ENGINES:
        engine = registry.engine_class(kind)
        try:
            engine.check_devices()
        except ConfigError as error:
            findings.append(Finding(kind, None, str(error)))
            continue
        how = engine.find_devices.__func__  # type: ignore[attr-defined]
        if how not in asked:  # engines that share a runtime need to be asked once
            asked[how] = _ask(kind, timeout_secs)
        findings.append(Finding(kind, *asked[how]))
    return findings


def answer(kind: str) -> None:
    """Print what an engine found, as JSON in the last line; run in a process of its own."""
    try:
        found = {"devices": registry.engine_class(kind).find_devices(), "reason": None}
    except (ConfigError, EngineError) as error:
        found = {"devices": None, "reason": str(error)}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def _ask(kind: str, timeout_secs: float) -> tuple[str | None, str | None]:
    command = [sys.executable, "-c", _PROGRAM.format(kind=kind)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_secs, check=False)
    except subprocess.TimeoutExpired:
        return None, f"it found no devices in {timeout_secs:g} s"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found = json.loads(lines[-1])
        return found["devices"], found["reason"]
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return None, f"its process ended with status {done.returncode}: {last}"
