"""The first command of a newcomer: `examples/gpt2_fsdp.py`, as it is launched from a shell."""

import json
import math
import subprocess
from pathlib import Path

import pytest

from tests import forkrun

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image", reason="comes with matplotlib")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "gpt2_fsdp.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--tee=3"]  # marks lines: [default1]:
SHORT = ["--steps", "8", "--batch-size", "2", "--context", "32", "--files", "60"]

# (how to launch it, arguments, devices that it shards over)
ONE_PROCESS_SPMD = pytest.param([], ["--engine", "xla", "--devices", "2"], 2, marks=pytest.mark.xla, id="spmd-2")
TWO_PROCESSES_NATIVE = pytest.param(TORCHRUN, ["--engine", "native"], 2, id="native-2")


def run(launcher: list[str], *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [forkrun.python("torch_xla"), *launcher, str(SCRIPT), *args],
        cwd=cwd,
        env=forkrun.environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "args", "num_devices"),
    [TWO_PROCESSES_NATIVE, ONE_PROCESS_SPMD],  # test_tour.py has others in one native process
)
def test_trains_and_writes_what_it_says(launcher: list[str], args: list[str], num_devices: int, tmp_path: Path) -> None:
    done = run(launcher, *args, *SHORT, "--out", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"loss.png", "metrics.json", "sample.txt"}
    with Image.open(out / "loss.png") as image:
        assert image.format == "PNG"
        image.verify()
    assert (out / "sample.txt").read_text(encoding="utf-8").startswith("def")

    metrics = json.loads((out / "metrics.json").read_text())
    losses = metrics["losses"]
    assert len(losses) == 8
    assert losses[0] == pytest.approx(math.log(4096), abs=0.3)  # as likely as any other token
    assert sum(losses[-2:]) / 2 < losses[0] - 0.3
    assert metrics["held_out_loss"] < losses[0] - 0.3
    assert 5 < metrics["unigram_entropy"] < math.log(4096)
    assert metrics["num_devices"] == num_devices
    if metrics["engine"] == "xla-spmd":
        assert metrics["num_compiles"] == 2, "one program trains, one evaluates"
    # Padding may add a little to a device's share; a device that holds a whole copy is far above it.
    assert metrics["num_parameters_per_device"] <= 1.05 * metrics["num_parameters"] / num_devices

    assert done.stdout.count("held-out text") == 1
    assert "8/8" in done.stderr
    other = "".join(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("[default1]:"))
    assert "step" not in other, "one process alone shows its progress"
    assert "loss" not in other, "one process alone reports"


def test_devices_that_contradict_torchrun_are_refused(tmp_path: Path) -> None:
    done = run(TORCHRUN, "--engine", "native", "--devices", "3", *SHORT, "--out", "out", cwd=tmp_path)
    assert done.returncode != 0
    assert "--devices 3 with 2 processes" in done.stderr
    assert "--nproc_per_node=3" in done.stderr
    assert not (tmp_path / "out").exists()


def test_several_native_devices_need_torchrun(tmp_path: Path) -> None:
    done = run([], "--engine", "native", "--devices", "2", cwd=tmp_path)
    assert done.returncode == 2
    assert "torchrun --standalone --nproc_per_node=2" in done.stderr
