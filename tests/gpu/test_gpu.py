"""Training on NVIDIA GPUs gives the numbers of the unsharded run on the CPU. Skipped where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forkrun, gpus

pytest.importorskip("transformers")

PROGRAM = Path(__file__).with_name("gpu_program.py")
ATTENTION = Path(__file__).parents[1] / "unit" / "engines" / "native" / "attention_program.py"
RING = ATTENTION.with_name("ring_program.py")
OF_ATTENTION = [
    "kernels_of_gpus_have_the_numbers",
    "kernels_of_gpus_in_bfloat16_are_near",
    "compiled_kernels_of_gpus_have_the_numbers",
]
NUM_GPUS = gpus.count()
RELATIVE = 1e-5

pytestmark = pytest.mark.gpu
native = pytest.param("native")
xla = pytest.param(
    "xla",
    marks=[
        pytest.mark.xla,
        pytest.mark.skipif(bool(gpus.why_not_xla()), reason=gpus.why_not_xla()),
    ],
)


def train(backend: str, out: Path, num_gpus: int = 1) -> dict[str, Any]:
    """Train on some GPUs: natively by a process for each, under XLA by one for all."""
    processes = num_gpus if backend == "native" else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = (gpus.under_xla if backend == "xla" else gpus.shown)(forkrun.environment())
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), str(PROGRAM), backend, str(num_gpus), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return train("reference", tmp_path_factory.mktemp("gpu") / "reference.json")


@pytest.mark.skipif(NUM_GPUS < 1, reason="this machine has no NVIDIA GPU")
@pytest.mark.parametrize("backend", [native, xla])
def test_one_gpu_trains_as_the_cpu_does(backend, reference, tmp_path):
    check(train(backend, tmp_path / "out.json"), backend, reference)


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"this machine has {NUM_GPUS} NVIDIA GPUs, and this needs 2")
@pytest.mark.parametrize("backend", [native, xla])
def test_two_gpus_train_as_the_cpu_does(backend, reference, tmp_path):
    check(train(backend, tmp_path / "out.json", num_gpus=2), backend, reference)


@pytest.mark.skipif(NUM_GPUS < 1, reason="this machine has no NVIDIA GPU")
def test_a_ring_has_the_numbers_of_all_tokens(tmp_path):
    """Four ranks share the GPU, where there are fewer."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    environment = gpus.shown(forkrun.environment(**{gpus.SWITCH: "cuda"}))
    subprocess.run([sys.executable, *launcher, str(RING), str(tmp_path)], env=environment, timeout=400, check=True)
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(found) == 4
    off = {(rank, case): each for rank, cases in found.items() for case, each in cases.items() if each[0] > 5 * each[1]}
    assert not off, "of the ring, and of one device"


@pytest.mark.skipif(NUM_GPUS < 1, reason="this machine has no NVIDIA GPU")
def test_kernels_of_attention_have_the_numbers_of_the_cpu(tmp_path):
    subprocess.run(
        [sys.executable, str(ATTENTION), str(tmp_path), *OF_ATTENTION],
        env=gpus.shown(forkrun.environment()),
        timeout=400,
        check=True,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == dict.fromkeys(OF_ATTENTION)


def check(found: dict[str, Any], backend: str, reference: dict[str, Any]) -> None:
    assert found["device"] == ("cuda:0" if backend == "native" else "xla:0")
    assert found["platform"] == (None if backend == "native" else "CUDA")
    assert found["losses"] == pytest.approx(reference["losses"], rel=RELATIVE)
    assert found["norms"] == pytest.approx(reference["norms"], rel=RELATIVE)
    assert len(set(reference["losses"])) == 5
