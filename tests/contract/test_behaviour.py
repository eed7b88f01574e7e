"""What scripts do beside training: each engine, on two devices, does it as plain PyTorch does, or refuses it.

One launch of `behaviour_worker.py` runs all cases of an engine, tiny models against their plain copies; its docstrings
and tolerances say how closely. A test here looks at how its case ended, on every rank.
"""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from casekit import CASES
from launching import run_all

pytest.importorskip("transformers")

WORKER = Path(__file__).with_name("behaviour_worker.py")
SECONDS_TO_RUN = 1200  # many times what an engine's cases take on two cores that do nothing else
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS_TO_RUN + 60)]
NUM_RANKS = {"native": 2, "xla-multiprocess": 2, "xla-spmd": 1}

runpy.run_path(str(WORKER))  # registers the cases
RANDOM = "second_model_draws_other_numbers_than_the_first"

Outcomes = dict[str, list[dict[str, Any]]]
"""How each case ended, by name and rank."""


def launch(engine: str, out: Path, *names: str) -> tuple[Outcomes, str]:
    """Run cases of an engine; return how they ended and what was printed."""
    out.mkdir()
    num_ranks = NUM_RANKS[engine] if NUM_RANKS[engine] > 1 else 0
    imports = ["torch_xla"] if engine.startswith("xla") else []
    printed = run_all(WORKER, engine, out, *names, num_ranks=num_ranks, imports=imports, seconds=SECONDS_TO_RUN)
    outcomes: Outcomes = {}
    for file in sorted(out.glob("*.json")):  # <case>.<rank>.json
        outcomes.setdefault(file.stem.rpartition(".")[0], []).append(json.loads(file.read_text()))
    return outcomes, printed


@pytest.fixture(scope="module")
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Outcomes, str]]:
    """Launches an engine when the first of its tests asks, with all that are selected, and keeps what came of it."""
    folder = tmp_path_factory.mktemp("behaviour")
    found: dict[str, tuple[Outcomes, str]] = {}

    def of(engine: str) -> tuple[Outcomes, str]:
        if engine not in found:
            given = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            names = [each["name"] for each in given if each.get("engine") == engine and each.get("name") in CASES]
            found[engine] = launch(engine, folder / engine, *dict.fromkeys([RANDOM, *names]))
        return found[engine]

    return of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("--full-contract")
    marks = {engine: [pytest.mark.xla] if engine.startswith("xla") else [] for engine in NUM_RANKS}
    behaviours = [
        pytest.param(engine, name, id=f"{engine}-2-{name}", marks=marks[engine])
        for engine in NUM_RANKS
        for name, each in CASES.items()
        if engine in each.engines and (every or not each.is_left_out)
    ]
    metafunc.parametrize(("engine", "name"), behaviours)


def test_behaviour(launched, engine, name):
    outcomes, printed = launched(engine)
    ended = outcomes.get(name, [])
    failures = [f"rank {rank}: {each['failed']}" for rank, each in enumerate(ended) if each["failed"]]
    assert not failures, "\n".join(failures)
    assert len(ended) == NUM_RANKS[engine], f"{engine} did not come as far as {name}; it printed:\n{printed[-6000:]}"


@pytest.mark.xla
def test_seed_decides_over_random_numbers(launched, tmp_path):
    outcomes, printed = launch("xla-spmd", tmp_path / "again", RANDOM)
    assert RANDOM in outcomes, printed[-6000:]
    assert outcomes[RANDOM] == launched("xla-spmd")[0][RANDOM]
