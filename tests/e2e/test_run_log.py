"""What a person sees of a run, on each engine."""

import json
import os
from pathlib import Path

import pytest

from tests import forkrun

WORKER = Path(__file__).with_name("run_log_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "num_processes"),
    [
        ("native", 2),
        pytest.param("xla-spmd", 1, marks=pytest.mark.xla),
        pytest.param("xla-multiprocess", 2, marks=pytest.mark.xla),
    ],
)
def test_what_a_run_shows_and_leaves(tmp_path, engine, num_processes):
    folder = tmp_path / "demo"
    folder.mkdir()
    environ = os.environ | {"PJRT_DEVICE": "CPU", "WANDB_MODE": "offline"}
    num_ranks = num_processes if num_processes > 1 else 0
    imports = ["torch_xla"] if engine.startswith("xla") else []
    done = forkrun.run(
        WORKER, engine, folder, num_ranks=num_ranks, imports=imports, env=environ, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])

    *rows, end = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["loss"] for row in rows] == found["losses"]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert [row["step"] for row in rows if "tokens_per_sec" in row] == [5, 10, 12]
    assert all(row["process_memory_bytes"] > 2**26 for row in rows if "tokens_per_sec" in row)
    assert end["event"] == "finished"
    if engine == "xla-spmd":
        assert found["num_compiles"] == 1
        waited = [step for step, fetches in enumerate(found["fetches"], start=1) if fetches]
        assert waited == [2, 5, 10, 12], "the device is waited for once an interval, and after the warm-up"

    assert done.stderr.count("torchacc: step 10/12  loss") == 1
    assert "torchacc[1]" not in done.stderr
    ranks = [f"rank-{rank:05d}.log" for rank in range(num_processes)]
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ranks
    assert f"{engine}: dp 1 x fsdp 2" in (folder / "training.log").read_text()
    assert engine in (folder / "report.html").read_text()
    if engine == "native":
        assert list((folder / "tensorboard").glob("events.*"))
        assert list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
