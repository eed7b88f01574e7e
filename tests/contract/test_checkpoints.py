"""A checkpoint of any engine at any size loads into any other, bit for bit, and training goes on as if uninterrupted.

    python -m pytest tests/contract/test_checkpoints.py --write-tables

writes what came of it to `docs/checkpoint_matrix.md`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, environment
from layouts import LAYOUTS

WORKER = Path(__file__).with_name("checkpoint_worker.py")
TABLE = ROOT / "docs" / "checkpoint_matrix.md"
SECONDS_TO_RUN = 300
RELATIVE = 1e-5
"""How far losses of another layout may be from the uninterrupted run's: its sums run in another order."""

INTRODUCTION = """# A checkpoint loads anywhere

Each row is a layout that saved, after 3 steps of AdamW in two groups with a scheduler and a shuffled loader; each
column a layout that loaded it. In every pair the parameters, buffers and optimizer states are equal bit for bit. The
entry is the largest relative difference of the next 5 losses, some of the next epoch, from the run that was not
interrupted; *equal* is to the last digit. The global batch is the same everywhere. `hybrid` is 2 replicas of 2 shards,
`flat` is `flatten_parameters=True`.

Written by `python -m pytest tests/contract/test_checkpoints.py --write-tables`.
"""


class Runs:
    """Launches each layout once to save, and once to load what all have saved."""

    def __init__(self, folder: Path, layouts: list[str]) -> None:
        self._folder = folder
        self.layouts = layouts

    def uninterrupted(self, saved: str) -> list[float]:
        return self._result(saved, "losses")

    def loaded(self, name: str, saved: str) -> dict[str, Any]:
        for other in self.layouts:
            self._result(other, "losses")
        return self._result(name, "loads")[saved]

    def _result(self, name: str, kind: str) -> Any:
        path = self._folder / f"{name}.{kind}.json"
        printed = self._folder / f"{name}.{kind}.txt"
        if not printed.exists():
            printed.write_text(self._launch("save" if kind == "losses" else "load", name))
        if not path.exists():
            pytest.fail(f"{name} did not come to its {kind}; it printed:\n{printed.read_text()[-6000:]}", pytrace=False)
        return json.loads(path.read_text())

    def _launch(self, what: str, name: str) -> str:
        layout = LAYOUTS[name]
        launcher = [str(ROOT / "tests" / "forkrun.py"), str(layout.num_processes)]
        done = subprocess.run(
            [sys.executable, *(launcher if layout.is_launched else []), str(WORKER), what, name, str(self._folder)],
            env=environment(TORCHACC_LAYOUTS=",".join(self.layouts)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_TO_RUN,
            check=False,
        )
        return done.stdout


def params(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.xla] if name.startswith("xla") else [])


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    chosen = {
        item.callspec.params[key] for item in request.session.items if _is_ours(item) for key in ("name", "saved")
    }
    runs = Runs(tmp_path_factory.mktemp("checkpoints"), [layout for layout in LAYOUTS if layout in chosen])
    yield runs
    if request.config.getoption("--write-tables"):
        TABLE.write_text(table(runs), encoding="utf-8")


def _is_ours(item: pytest.Item) -> bool:
    return item.path == Path(__file__)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [params(name) for name in LAYOUTS])
@pytest.mark.parametrize("saved", [params(name) for name in LAYOUTS])
def test_a_checkpoint_loads_anywhere(runs, saved, name):
    found, expected = runs.loaded(name, saved), runs.uninterrupted(saved)
    assert not found["differences"]
    if name == saved:
        assert found["losses"] == expected
    else:
        assert found["losses"] == pytest.approx(expected, rel=RELATIVE)


def table(runs: Runs) -> str:
    """Return how far the losses after loading are from the uninterrupted run's, for each pair of layouts."""
    names = runs.layouts
    rows = []
    for saved, name in product(names, names):
        found, expected = runs.loaded(name, saved), runs.uninterrupted(saved)
        off = max(abs(a / b - 1) for a, b in zip(found["losses"], expected, strict=True))
        entry = "**differs**" if found["differences"] else "equal" if off == 0 else f"{off:.0e}"
        if name == names[0]:
            rows.append([saved])
        rows[-1].append(entry)
    header = ["", *names]
    lines = [INTRODUCTION, "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])
