"""Launch each engine once for a file of tests, with the cases that those selected need of it.

A test with `engine` and `name` is about one case of the table (`casekit.CASES`) on one engine, and `launched(engine)`
is what came of them. A test of training says with `@pytest.mark.covers(engines=…, models=…, variants=…)` what it is
about, and gets combinations as the fixture `case`; `outcome` is what that run came to, and `reference` the same in
plain PyTorch, unsharded.

Not all combinations are run, but so many that each pair is: of an engine, a number of devices, a model, a variant and a
test (see `covering.py`). Of the table, what is about all three engines runs natively and on XLA's two in turn, and so
do the entries of what is about XLA's two. `--full-contract` runs all, and what a mark names with `in_full=True`, too;
`--third-of-entries` each case with a third of its entries, where another run has all and this one another PyTorch.

A file may say with `INSTEAD_OF` which engines stand in place of others in tests that it takes from another file, with
`TABLE_ON` on which engines its tests are about all cases there are for these, and with `DUMPS` that XLA writes the
programs that it compiles.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # as for the workers, which are scripts

from casekit import ALL, CASES, REFERENCE, XLA
from launching import FULL_CONTRACT, Launch, launch
from matrix import TrainingCase, cases_of, chosen_cases

Launched = Callable[[str], Launch]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "covers(engines, models, variants, in_full): run a test of the contract for each combination, as `case`",
    )
    if config.getoption("--full-contract"):
        os.environ[FULL_CONTRACT] = "1"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--full-contract")
    if "case" in metafunc.fixturenames:
        cases = cases_of(metafunc.function, metafunc.module, in_full=every)
        if not every:
            chosen = chosen_cases(metafunc.module)
            cases = [case for case in cases if case in chosen]
        metafunc.parametrize("case", [pytest.param(case, id=case.id, marks=case.marks) for case in cases])
    if hasattr(metafunc.module, "TABLE_ON") and "name" in metafunc.fixturenames:
        choose = _third_of_entries if metafunc.config.getoption("--third-of-entries") else list
        params = [
            pytest.param(engine, name, id=f"{engine}-{name}", marks=marks_of(engine))
            for engine in metafunc.module.TABLE_ON
            for name in choose(_names_of(engine, every=every))
        ]
        metafunc.parametrize(("engine", "name"), params)


def _names_of(engine: str, *, every: bool) -> list[str]:
    return [
        name
        for name, case in CASES.items()
        if engine.replace("-gpu-", "-") in {f"{kind}-{case.num_devices}" for kind in case.engines}
        and (every or (not case.is_left_out and name not in _left_to_the_other(engine)))
    ]


def _third_of_entries(names: Iterable[str]) -> list[str]:
    entries = defaultdict(list)
    for name in names:
        entries[name.partition("-")[0]].append(name)
    return [name for several in entries.values() for name in several[::3]]


@cache
def _left_to_the_other(engine: str) -> frozenset[str]:
    """Return the cases that the other of XLA's engines runs: every second one of those which run natively as well, and
    of the entries of what is about these two."""
    if engine not in ("xla-multiprocess-2", "xla-spmd-2"):
        return frozenset()
    on_two = {name: set(case.engines) for name, case in CASES.items() if case.num_devices == 2}
    of_all = [name for name, engines in on_two.items() if engines == set(ALL)]
    entries = [name for name, engines in on_two.items() if engines == set(XLA) and "-" in name]
    return frozenset(each for names in (of_all, entries) for each in names[engine == "xla-spmd-2" :: 2])


def marks_of(engine: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xla] if engine.startswith("xla") else []


def names_needed(params: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the cases that a test with these parameters looks at, each with its engine."""
    case = params.get("case")
    if isinstance(case, TrainingCase):
        references = (case.as_reference()["id"], case.as_plain_reference()["id"])
        return [(case.engine, case.name), *((REFERENCE + "-1", name) for name in references)]
    return [(params["engine"], params["name"])] if {"engine", "name"} <= params.keys() else []


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Launches an engine when the first of a file's tests asks, with all that are selected, and keeps what came."""
    folder = tmp_path_factory.mktemp("contract")
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            for engine, name in names_needed(item.callspec.params):
                names[engine][name] = None
    dumps = getattr(request.module, "DUMPS", False)
    found: dict[str, Launch] = {}

    def of(engine: str) -> Launch:
        if engine not in found:
            found[engine] = launch(engine, folder / engine, list(names[engine]), dumps=dumps)
        return found[engine]

    return of


@pytest.fixture
def outcome(launched: Launched, case: TrainingCase) -> dict[str, Any]:
    """What became of this test's run."""
    found = launched(case.engine).returned(case.name)
    assert "refused" not in found, f"{case.id} was refused: {found['refused']}"
    return found


@pytest.fixture
def refusal(launched: Launched, case: TrainingCase) -> str:
    """The message with which this test's run was refused."""
    found = launched(case.engine).returned(case.name)
    assert "refused" in found, f"{case.id} was not refused"
    return found["refused"]


@pytest.fixture
def reference(launched: Launched, case: TrainingCase) -> dict[str, Any]:
    """What became of the same training in plain PyTorch, unsharded."""
    return launched(REFERENCE + "-1").returned(case.as_reference()["id"])


@pytest.fixture
def plain_reference(launched: Launched, case: TrainingCase) -> dict[str, Any]:
    """What became of it with the whole batch at once and in float32, where the variant is compared with another."""
    return launched(REFERENCE + "-1").returned(case.as_plain_reference()["id"])
