"""The contract on one NVIDIA GPU, skipped where there is none: see `tests/gpus.py`.

For the native engine it is whole: the tests are those of `test_engines.py`, the behaviours those of the tables for 2
and 4 devices, and checkpoints go between the CPU and the GPU. Under XLA, where its plugin is installed, it is what
`test_engines.py` has for one device. What they are compared with is computed on the CPU, to the same tolerances. Where
a machine has fewer GPUs than ranks, the ranks share one.
"""

import json

import pytest

pytest.importorskip("transformers")
import test_engines
from launching import SECONDS_TO_RUN, launch_on_gpus
from matrix import all_cases
from test_checkpoints import RELATIVE, WORKER, run_all

from tests import gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(SECONDS_TO_RUN + 60),
    pytest.mark.skipif(gpus.kind() is None, reason=gpus.why_not()),
]
INSTEAD_OF = {f"native-{number}": f"native-gpu-{number}" for number in (1, 2, 4)}
if not gpus.why_not_xla():
    INSTEAD_OF["xla-spmd-1"] = "xla-spmd-gpu-1"
TABLE_ON = ("native-gpu-2", "native-gpu-4")

for name, test in vars(test_engines).items():
    if name.startswith("test_") and any(
        case.engine in INSTEAD_OF for case in all_cases(getattr(test, "pytestmark", []))
    ):
        globals()[name] = test


def test_behaviour(launched, engine, name):
    launched(engine).returned(name)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with what each saved and what the other made of it, after both have done so."""
    folder = tmp_path_factory.mktemp("checkpoints")
    printed = run_all(WORKER, "save", "native-2", folder, num_ranks=2, seconds=SECONDS_TO_RUN)
    printed += launch_on_gpus(1, WORKER, "save", "native-1", folder, "native-2", "native-1")
    printed += run_all(WORKER, "load", "native-2", folder, "native-1", num_ranks=2, seconds=SECONDS_TO_RUN)
    print(printed)
    return folder


@pytest.mark.parametrize(
    ("saved", "loaded"), [("native-1", "native-1"), ("native-1", "native-2"), ("native-2", "native-1")]
)
def test_a_checkpoint_goes_between_the_gpu_and_the_cpu(checkpoints, saved, loaded):
    """`native-1` is the GPU here."""
    found = json.loads((checkpoints / f"{saved}.{loaded}.json").read_text())
    expected = json.loads((checkpoints / f"{saved}.json").read_text())
    assert not found["differences"]
    assert found["losses"] == pytest.approx(expected, rel=RELATIVE)
