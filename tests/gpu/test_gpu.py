"""Training on NVIDIA GPUs gives the numbers of the unsharded run on the CPU. Skipped where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import accelerators, forkrun, gpus

pytest.importorskip("transformers")

ATTENTION = Path(__file__).parents[1] / "unit" / "engines" / "native" / "attention_program.py"
RING = ATTENTION.with_name("ring_program.py")
OF_ATTENTION = [
    "kernels_of_gpus_have_the_numbers",
    "kernels_of_gpus_in_bfloat16_are_near",
    "compiled_kernels_of_gpus_have_the_numbers",
]
NUM_GPUS = gpus.count()

pytestmark = pytest.mark.gpu
native = pytest.param("native")
xla = pytest.param(
    "xla",
    marks=[
        pytest.mark.xla,
        pytest.mark.skipif(bool(gpus.why_not_xla()), reason=gpus.why_not_xla()),
    ],
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "reference.json"
    return accelerators.train("reference", 1, out, forkrun.environment())


@pytest.mark.skipif(NUM_GPUS < 1, reason="this machine has no NVIDIA GPU")
@pytest.mark.parametrize("backend", [native, xla])
def test_one_gpu_trains_as_the_cpu_does(backend, reference, tmp_path, record_property):
    check(backend, 1, reference, tmp_path / "out.json", record_property)


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"this machine has {NUM_GPUS} NVIDIA GPUs, and this needs 2")
@pytest.mark.parametrize("backend", [native, xla])
def test_two_gpus_train_as_the_cpu_does(backend, reference, tmp_path, record_property):
    check(backend, 2, reference, tmp_path / "out.json", record_property)


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


def check(backend, count, reference, out, report):
    """Train natively by a process for each GPU, under XLA by one for all."""
    environment = (gpus.under_xla if backend == "xla" else gpus.shown)(forkrun.environment())
    processes = count if backend == "native" else 1
    found = accelerators.train(backend, count, out, environment, processes=processes)
    assert found["device"] == ("cuda:0" if backend == "native" else "xla:0")
    assert found["platform"] == (None if backend == "native" else "CUDA")
    accelerators.compare(found, reference, report, f"{backend} on {count}")
