"""A checkpoint of any engine at any size loads into any other, bit for bit, and training goes on as if uninterrupted.

Each layout is saved for, and loaded by, each engine and each number of devices; `--full-contract` goes all ways, and

    python -m pytest tests/contract/test_checkpoints.py --write-tables

does so as well, and writes what came of it to `docs/checkpoint_matrix.md`.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT, run_all
from layouts import LAYOUTS, Launch, Way, chosen_ways, every_way, launches

WORKER = Path(__file__).with_name("checkpoint_worker.py")
TABLE = ROOT / "docs" / "checkpoint_matrix.md"
SECONDS_TO_RUN = 300
KINDS = {layout.kind for layout in LAYOUTS.values()}
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
    """Launches the layouts when the first of their tests asks, and keeps what came of it."""

    def __init__(self, folder: Path, ways: list[Way]) -> None:
        self._folder = folder
        self.ways = ways
        self._printed: dict[str, str] = {}

    def uninterrupted(self, saved: str) -> list[float]:
        return self._result(saved, saved)

    def loaded(self, name: str, saved: str) -> dict[str, Any]:
        return self._result(name, f"{saved}.{name}")

    def _result(self, name: str, file: str) -> Any:
        if not self._printed:
            for launch in launches(self.ways):
                self._printed[launch.name] = self._printed.get(launch.name, "") + self._launch(launch)
        path = self._folder / f"{file}.json"
        if not path.exists():
            pytest.fail(f"{name} did not come as far; it printed:\n{self._printed[name][-6000:]}", pytrace=False)
        return json.loads(path.read_text())

    def _launch(self, launch: Launch) -> str:
        layout = LAYOUTS[launch.name]
        num_ranks = layout.num_processes if layout.is_launched else 0
        what = "save" if launch.saves else "load"
        given = (what, launch.name, self._folder, *launch.loads)
        imports = ["torch_xla"] if layout.kind.startswith("xla") else []
        return run_all(WORKER, *given, num_ranks=num_ranks, imports=imports, seconds=SECONDS_TO_RUN)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "saved" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("--full-contract") or metafunc.config.getoption("--write-tables")
    ways = every_way() if every else chosen_ways()
    params = [pytest.param(*way, marks=[pytest.mark.xla] if "xla" in "".join(way) else []) for way in ways]
    metafunc.parametrize(("saved", "name"), params)


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    given = [getattr(item, "callspec", None) for item in request.session.items if item.path == Path(__file__)]
    ways = [(spec.params["saved"], spec.params["name"]) for spec in given if spec]
    runs = Runs(tmp_path_factory.mktemp("checkpoints"), ways)
    yield runs
    if request.config.getoption("--write-tables"):
        TABLE.write_text(table(runs), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_checkpoint_loads_anywhere(runs, saved, name):
    found, expected = runs.loaded(name, saved), runs.uninterrupted(saved)
    assert not found["differences"]
    if name == saved:
        assert found["losses"] == expected
    else:
        assert found["losses"] == pytest.approx(expected, rel=RELATIVE)


def test_each_layout_is_saved_for_each_engine_and_number_of_devices_and_loaded_by_each():
    every, chosen = every_way(), chosen_ways()
    assert len(every) == len(LAYOUTS) ** 2
    assert set().union(*(every[way] for way in chosen)) == set().union(*every.values())
    for layout in LAYOUTS:
        assert (layout, layout) in every
        assert {LAYOUTS[name].kind for saved, name in chosen if saved == layout} == KINDS
        assert {LAYOUTS[saved].kind for saved, name in chosen if name == layout} == KINDS
    assert len(chosen) < len(every) / 2


def test_what_is_loaded_has_been_saved():
    ways = list(every_way())
    saved, gone = set(), []
    for launch in launches(ways):
        saved |= {launch.name} if launch.saves else set()
        assert saved.issuperset(launch.loads)
        gone += [(other, launch.name) for other in launch.loads]
    assert sorted(gone) == sorted(ways)


def table(runs: Runs) -> str:
    """Return how far the losses after loading are from the uninterrupted run's, for each pair of layouts."""
    names = list(LAYOUTS)
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
