"""How layers lie split over devices, what a step sends between them, and checkpoints of such models.

That they train as the unsharded model does is seen in `test_engines.py`. One launch of `tensor_parallel_worker.py` with
four devices runs all cases; a test here looks at how its case ended.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from casekit import CASES

pytest.importorskip("transformers")
pytestmark = [pytest.mark.xla, pytest.mark.slow]

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
ROOT = Path(__file__).parents[2]
SECONDS_TO_RUN = 300  # many times what it takes on two cores that do nothing else

others = set(CASES)
runpy.run_path(str(WORKER))  # registers the cases
NAMES = [name for name in CASES if name not in others]
for name in NAMES:
    del CASES[name]  # they are not the other worker's

Outcomes = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcomes, str]:
    """Run all cases; return how each ended, and what was printed."""
    out, programs = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("programs")
    dumped = f"--xla_dump_to={programs} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*SyncTensors.*"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "XLA_FLAGS": dumped,
        "TORCHACC_TEST_PROGRAMS": str(programs),
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), "xla-spmd", str(out)],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_TO_RUN,
        check=False,
    )
    return {file.stem.rpartition(".")[0]: json.loads(file.read_text()) for file in out.glob("*.json")}, done.stdout


def ended(launched: tuple[Outcomes, str], name: str) -> Any:
    outcomes, printed = launched
    assert name in outcomes, f"the worker did not come as far as {name}; it printed:\n{printed[-6000:]}"
    assert not outcomes[name]["failed"], outcomes[name]["failed"]
    return outcomes[name]["returned"]


@pytest.mark.parametrize("name", NAMES)
def test_case(launched, name):
    ended(launched, name)


def test_layers_that_are_split_send_sums_only(launched):
    found = ended(launched, "what_a_step_sends-alone")
    assert set(found) == {"all-reduce"}


def test_only_weights_are_gathered_where_they_are_sharded_too(launched):
    found = ended(launched, "what_a_step_sends-with-fsdp")
    assert set(found["all-gather"]) <= {"{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)"}, "gathered over tp"


def test_activations_are_gathered_where_they_are_split_along_the_sequence(launched):
    found = ended(launched, "what_a_step_sends-along-the-sequence")
    assert "all-gather" in found
