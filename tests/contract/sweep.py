"""Run `family_worker.py` over families: again for the rest where one of them crashes, hangs or fails.

python tests/contract/sweep.py ENGINE OUT [NAME …]
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launching import environment

from tests import forkrun

WORKER = Path(__file__).with_name("family_worker.py")
NUM_RANKS = {"plain": 1, "native": 2, "native-tp": 2, "xla-multiprocess": 2, "xla-spmd": 1}
SECONDS = {"plain": 120, "native": 240, "native-tp": 240, "xla-multiprocess": 480, "xla-spmd": 480}
"""For a family, and for the start: many times what they take on two cores that do nothing else."""
AT_ONCE = {"plain": 400, "native": 400, "native-tp": 400, "xla-multiprocess": 60, "xla-spmd": 60}
"""Families of a process; compiled programs stay in its memory."""

Found = dict[str, dict[str, Any]]


def sweep(engine: str, out: Path, names: list[str]) -> Found:
    """Return how each family went, by name."""
    out.mkdir(parents=True, exist_ok=True)
    found = read(out, engine, names)
    while remaining := [name for name in names if name not in found]:
        printed = _run(engine, out, remaining[: AT_ONCE[engine]])
        now = read(out, engine, names)
        if now.keys() == found.keys():  # the first has ended the process, or hangs
            begun = [line.split()[1] for line in printed.splitlines() if line.startswith("family ")]
            name = begun[-1] if begun else remaining[0]
            facts = {"outcome": "crashes", "reason": _last(printed)}
            for rank in range(NUM_RANKS[engine]):
                (out / f"{name}.{rank}.json").write_text(json.dumps(facts))
            now = read(out, engine, names)
        found = now
    return found


def read(out: Path, engine: str, names: list[str]) -> Found:
    found = {}
    for name in names:
        files = [out / f"{name}.{rank}.json" for rank in range(NUM_RANKS[engine])]
        ranks = [json.loads(file.read_text()) for file in files if file.exists()]
        bad = [each for each in ranks if each["outcome"] in ("fails", "crashes")]
        if bad or len(ranks) == NUM_RANKS[engine]:
            worst = [each for each in ranks if each["outcome"] not in ("agrees", "built")]
            found[name] = (bad or worst or ranks)[0]
    return found


def _last(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip() and not line.startswith("family ")]
    return " / ".join(lines[-4:])[-600:] or "nothing printed"


def _run(engine: str, out: Path, names: list[str]) -> str:
    """Run the worker until it ends, or a family takes too long; return what it printed."""
    python = forkrun.python(*(["torch_xla"] if engine.startswith("xla") else []))
    launcher = [forkrun.__file__, str(NUM_RANKS[engine])]
    log = out / f"log-{time.time():.0f}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [python, *(launcher if NUM_RANKS[engine] > 1 else []), str(WORKER), engine, str(out), *names],
            env=environment(**({"CPU_NUM_DEVICES": "2"} if engine == "xla-spmd" else {})),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _watch(process, out, SECONDS[engine])
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return log.read_text(errors="replace")


def _watch(process: subprocess.Popen[bytes], out: Path, seconds: float) -> None:
    count, since = -1, time.monotonic()
    while process.poll() is None and time.monotonic() - since < seconds:
        time.sleep(0.2)
        now = sum(1 for _ in out.glob("*.json"))
        if now != count:
            count, since = now, time.monotonic()


if __name__ == "__main__":
    from families import all_families

    from tests import conftest  # noqa: F401 - sets the variables of the tests

    chosen = sys.argv[3:] or list(all_families())
    for name, facts in sweep(sys.argv[1], Path(sys.argv[2]), chosen).items():
        print(name, facts["outcome"], facts.get("mode", ""), facts.get("reason", "")[:200])
