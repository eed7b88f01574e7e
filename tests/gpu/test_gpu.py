"""Training on NVIDIA GPUs gives the numbers of the unsharded run on the CPU. Skipped where there is no GPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forkrun, gpus

pytest.importorskip("transformers")

from torchacc.engines.xla import cuda

PROGRAM = Path(__file__).with_name("gpu_program.py")
NUM_GPUS = gpus.count()
HAS_XLA = importlib.util.find_spec("torch_xla") is not None and cuda.installed_plugin() is not None
RELATIVE = 1e-5

pytestmark = pytest.mark.gpu
native = pytest.param("native")
xla = pytest.param(
    "xla",
    marks=[
        pytest.mark.xla,
        pytest.mark.skipif(not HAS_XLA, reason="pip install 'torchacc[xla-cuda]'"),
    ],
)


def train(backend: str, out: Path, num_gpus: int = 1) -> dict[str, Any]:
    """Train on some GPUs: natively by a process for each, under XLA by one for all."""
    processes = num_gpus if backend == "native" else 1
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = gpus.shown(forkrun.environment())
    for name in ("PJRT_DEVICE", "XLA_FLAGS"):  # chosen for tests on a CPU
        environment.pop(name, None)
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


def check(found: dict[str, Any], backend: str, reference: dict[str, Any]) -> None:
    assert found["device"] == ("cuda:0" if backend == "native" else "xla:0")
    assert found["platform"] == (None if backend == "native" else "CUDA")
    assert found["losses"] == pytest.approx(reference["losses"], rel=RELATIVE)
    assert found["norms"] == pytest.approx(reference["norms"], rel=RELATIVE)
    assert len(set(reference["losses"])) == 5
