"""How layers lie split over devices, what a step sends between them, and checkpoints of such models.

That they train as the unsharded model does is seen in `test_engines.py`. One launch of `tensor_parallel_worker.py` with
four devices runs all cases of an engine; a test here looks at how its case ended.
"""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from casekit import CASES
from launching import environment, run_all

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
SECONDS_TO_RUN = 300  # many times what it takes on two cores that do nothing else

NUM_RANKS = {"native": 4, "xla-spmd": 0}

others = set(CASES)
runpy.run_path(str(WORKER))  # registers the cases
OWN = {name: CASES.pop(name) for name in set(CASES) - others}  # they are not the other worker's

Outcomes = dict[str, list[dict[str, Any]]]
"""How each case ended, by name and rank."""


def launch(engine: str, out: Path, programs: Path) -> tuple[Outcomes, str]:
    """Run all cases of an engine; return how they ended, and what was printed."""
    dump = f"--xla_dump_to={programs} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*SyncTensors.*"
    variables = {"XLA_FLAGS": environment(dump)["XLA_FLAGS"], "TORCHACC_TEST_PROGRAMS": str(programs)}
    imports = ["torch_xla"] if engine.startswith("xla") else []
    ranks = NUM_RANKS[engine]
    printed = run_all(WORKER, engine, out, num_ranks=ranks, imports=imports, seconds=SECONDS_TO_RUN, **variables)
    outcomes: Outcomes = {}
    for file in sorted(out.glob("*.json")):  # <case>.<rank>.json
        outcomes.setdefault(file.stem.rpartition(".")[0], []).append(json.loads(file.read_text()))
    return outcomes, printed


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """Launches an engine when the first of its tests asks, and returns what a case of it returned on rank 0."""
    found: dict[str, tuple[Outcomes, str]] = {}

    def of(engine: str, name: str) -> Any:
        if engine not in found:
            found[engine] = launch(engine, *(tmp_path_factory.mktemp(kind) for kind in ("out", "programs")))
        outcomes, printed = found[engine]
        ranks = outcomes.get(name, [])
        failures = [f"rank {rank}: {each['failed']}" for rank, each in enumerate(ranks) if each["failed"]]
        assert not failures, "\n".join(failures)
        expected = NUM_RANKS[engine] or 1
        assert len(ranks) == expected, f"{engine} did not come as far as {name}; it printed:\n{printed[-6000:]}"
        return ranks[0]["returned"]

    return of


CASES_OF_ENGINES = [
    pytest.param(engine, name, id=f"{engine}-4-{name}", marks=[pytest.mark.xla] if engine == "xla-spmd" else [])
    for engine in NUM_RANKS
    for name in sorted(OWN)
    if engine in OWN[name].engines
]


@pytest.mark.parametrize(("engine", "name"), CASES_OF_ENGINES)
def test_case(ended, engine, name):
    ended(engine, name)


@pytest.mark.xla
def test_layers_that_are_split_send_sums_only(ended):
    found = ended("xla-spmd", "what_a_step_sends-alone")
    assert set(found) == {"all-reduce"}


@pytest.mark.xla
def test_only_weights_are_gathered_where_they_are_sharded_too(ended):
    found = ended("xla-spmd", "what_a_step_sends-with-fsdp")
    assert set(found["all-gather"]) <= {"{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)"}, "gathered over tp"


@pytest.mark.xla
def test_activations_are_gathered_where_they_are_split_along_the_sequence(ended):
    found = ended("xla-spmd", "what_a_step_sends-along-the-sequence")
    assert "all-gather" in found
