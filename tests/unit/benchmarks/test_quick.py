"""Each program runs to its end at its smallest size; its numbers are nowhere asserted."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import forkrun

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
QUICK = {
    "vocabulary": [],
    "trainer_overhead": [],
    "input_pipeline": [],
    "gpu": ["--device", "cpu", "--models", "Llama 1.2B"],
}
"""Programs with what they are told: those that have workers of their own, and one that has not."""
ALIKE = {
    **dict.fromkeys(("scaling", "fsdp_claims", "axes_memory", "axes_time", "layout_search", "many_devices"), []),
    "beside": [str(BENCHMARKS.parent)],
}
"""Those whose workers others run, too: they are run with `--every-benchmark`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        more = ALIKE if metafunc.config.getoption("--every-benchmark") else {}
        metafunc.parametrize("name", [*QUICK, *more])


@pytest.mark.slow
def test_a_program_measures_checks_and_hands_over(name, tmp_path):
    from _machine import checkout_environment
    from _results import read

    path = tmp_path / f"{name}.json"
    python = forkrun.python("torch_xla")
    command = [python, str(BENCHMARKS / f"{name}.py"), "--quick", "--json", str(path), *(QUICK | ALIKE)[name]]
    done = subprocess.run(command, env=checkout_environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = read(path)
    assert report.name == name
    assert all(check.verdict == "held" for check in report.checks), report.checks
    assert all(table.rows for table in report.tables)
    assert all(len(row) == len(table.header) for table in report.tables for row in table.rows)
    assert done.stdout.startswith(f"## {report.title}")


@pytest.mark.slow
def test_each_way_to_train_the_largest_model_runs(tmp_path):
    """Tiny, on a CPU, with float8 emulated and graphs that are not turned into code."""
    pytest.importorskip("torchao")
    from _machine import checkout_environment
    from _results import read

    path = tmp_path / "gpu.json"
    names = ["torchtitan's recipe by hand, fp8", "FULL_SHARD, recompute, torch.compile, fp8"]
    command = [forkrun.python("torch_xla"), str(BENCHMARKS / "gpu.py"), "--quick", "--device", "cpu"]
    command += ["--models", "largest Llama", "--cases", *names, "--json", str(path)]
    done = subprocess.run(command, env=checkout_environment(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = read(path)
    assert [row[0] for row in report.tables[0].rows] == names
    assert all(check.verdict == "held" for check in report.checks), report.checks


@pytest.mark.slow
def test_without_a_gpu_the_gpus_profile_says_so_and_keeps_what_was_measured(tmp_path):
    from _machine import checkout_environment
    from _programs import RESULTS

    kept = tmp_path / "gpu.json"
    shutil.copy(RESULTS / "compile.json", kept)
    hidden = checkout_environment() | {"CUDA_VISIBLE_DEVICES": ""}
    command = [forkrun.python(), "-m", "benchmarks", "--profile", "gpu", "--results", str(tmp_path)]
    done = subprocess.run(
        command, cwd=BENCHMARKS.parent, env=hidden, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "gpu.py needs a GPU" in done.stderr
    assert "gpu ended with 2" in done.stderr
    assert kept.read_bytes() == (RESULTS / "compile.json").read_bytes()
