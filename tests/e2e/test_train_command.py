"""The training commands of docs/trainer.md: real processes, a tiny model, and this project's own text."""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests import forkrun
from torchacc.cli.main import main
from torchacc.errors import ConfigError
from torchacc.train.file import TrainFile
from torchacc.train.stage import StageRequest, resolve_stage

ROOT = Path(__file__).parents[2]
SECONDS = 240

CONFIG = f"""
output_dir: out
training_stages:
  stage1: &stage
    model_config: model_config_tiny
    data:
      dataset: text
      files: {ROOT / "docs" / "*.md"}
      vocab_size: 300
      block_size: 16
      validation_share: 0.3
      cache_dir: cache
    training: {{max_steps: 4, log_every_steps: 1, eval_steps: 2, save_every_steps: null}}
  stage2:
    <<: *stage
    init_from: stage1
    training: {{max_steps: 3, log_every_steps: 1, eval_steps: 2, gradient_accumulation_steps: 2}}
  diverging:
    <<: *stage
    optimizer: {{name: sgd, lr: 1.0e+38}}
    scheduler: {{warmup_steps: 2}}
    training: {{max_steps: 8, log_every_steps: 4, eval_every_steps: 8, save_every_steps: 1, keep_checkpoints: 2}}
  after: {{<<: *stage, init_from: diverging}}
distributed_examples:
  single_node_fsdp:
    strategy: "fsdp"
    num_nodes: 1
    devices: 8
    fsdp: {{enabled: true, cpu_offload: false, sharding_strategy: "FULL_SHARD", activation_checkpointing: true}}
  multi_node_fsdp:
    strategy: "fsdp"
    num_nodes: 4
    devices: 8
    fsdp: {{enabled: true, cpu_offload: true, sharding_strategy: "FULL_SHARD", activation_checkpointing: true}}
logging: {{debug: true, log_file: training.log}}
model_config_tiny: {{model_type: gpt2, n_layer: 2, n_head: 2, n_embd: 16, n_positions: 32}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return folder


def start(folder, *arguments, **variables):
    return subprocess.Popen(
        [forkrun.python(), *arguments],
        cwd=folder,
        env=forkrun.environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(*processes):
    """Wait for processes that end together, and return what each has printed."""
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    return printed


def losses(stage):
    rows = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def stage1(folder):
    """The first stage, trained by the example on one machine."""
    example = ROOT / "examples" / "fsdp_example.py"
    (printed,) = finish(
        start(folder, str(example), "--config", "config.yaml", "--fsdp-config", "single_node_fsdp", "--devices", "2")
    )
    assert "Traceback" not in printed
    return folder / "out" / "stage1"


@pytest.fixture(scope="module")
def stage2(folder, stage1):
    """The second, on two machines whose variables are set by hand."""
    command = ("-m", "torchacc.train", "--mode", "production", "--stage", "stage2", "--fsdp-config", "multi_node_fsdp")
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": forkrun.free_port(), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    nodes = [
        start(folder, *command, "--num-nodes", "2", "--devices", "1", RANK=str(rank), **variables) for rank in range(2)
    ]
    printed = finish(*nodes)
    (folder / "stage2.txt").write_text("".join(printed), encoding="utf-8")
    return folder / "out" / "stage2"


@pytest.mark.slow
def test_a_stage_leaves_a_model_with_its_tokenizer(stage1):
    assert json.loads((stage1 / "final" / "config.json").read_text(encoding="utf-8"))["n_layer"] == 2
    assert (stage1 / "final" / "tokenizer.json").is_file()
    assert len(losses(stage1)) == 4
    assert (stage1 / "finished.json").is_file()


@pytest.mark.slow
def test_the_next_stage_goes_on_from_it(stage1, stage2):
    assert len(losses(stage2)) == 3
    assert losses(stage2)[0] < losses(stage1)[0]
    found = json.loads((stage2 / "run.json").read_text(encoding="utf-8"))
    identity = found["identity"]
    assert found["options"]["training.batch_size"] > 0
    assert found["options"]["examples in a step"] > 0
    assert identity["init_from"] == "out/stage1/final"


@pytest.mark.slow
def test_one_rank_speaks_and_each_has_a_log(folder, stage2):
    line = "step 3/3  loss"
    assert (folder / "stage2.txt").read_text(encoding="utf-8").count(line) == 1
    assert (stage2 / "training.log").read_text(encoding="utf-8").count(line) == 1
    logs = [path.read_text(encoding="utf-8") for path in sorted((stage2 / "logs").iterdir())]
    assert [log.count(line) for log in logs] == [1, 0]
    assert all("DEBUG torchacc" in log for log in logs)
    assert "<td>out/stage2/final</td>" in (stage2 / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_torchrun_on_two_machines_trains_the_same(folder, stage2):
    again = (folder / "config.yaml").read_text(encoding="utf-8")
    again = again.replace("output_dir: out", "output_dir: again").replace(
        "init_from: stage1", "init_from: out/stage1/final"
    )
    (folder / "again.yaml").write_text(again, encoding="utf-8")
    torchrun = (
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"),
        *("--master_addr=127.0.0.1", f"--master_port={forkrun.free_port()}"),
    )
    command = ("-m", "torchacc.train", "--config=again.yaml", "--stage=stage2", "--fsdp-config=multi_node_fsdp")
    nodes = [
        start(folder, *torchrun, f"--node_rank={rank}", *command, "--num-nodes=2", "--devices=1") for rank in range(2)
    ]
    finish(*nodes)
    assert losses(folder / "again" / "stage2") == losses(stage2)


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(folder, stage1, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in stage1.rglob("*")}
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PJRT_SELECT_DEFAULT_DEVICE", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    assert main(["train", "--stage", "stage1", "--devices", "2"]) == 2
    assert "holds a finished run; pass --overwrite" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in stage1.rglob("*")} == before


@pytest.mark.slow
def test_a_stage_whose_loss_is_not_finite_is_not_finished(folder, monkeypatch):
    process = start(folder, "-m", "torchacc.train", "--stage", "diverging", "--devices", "1")
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2, printed
    assert "Traceback" not in printed
    told = re.search(r"error: from step (\d) on, the loss or its gradient is not finite: the stage has not", printed)
    assert told, printed
    first, stage = int(told[1]), folder / "out" / "diverging"
    assert not (stage / "final").exists()
    assert not (stage / "finished.json").exists()
    kept = sorted(path.name for path in (stage / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert kept == [f"step-{step:08}" for step in range(max(1, first - 2), first)]
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match="that stage has not finished"):
        resolve_stage(TrainFile.read("config.yaml"), StageRequest(stage="after"))


SNIPPET = """
from transformers import GPT2LMHeadModel

from torchacc.train import train_production_mode

trainer, module = train_production_mode(
    model_config_key="model_config_tiny",
    stage="stage1",
    devices=1,  # Will be overridden by config if specified
    precision="bf16-mixed",
    config="snippet.yaml",
)
assert isinstance(module, GPT2LMHeadModel)
print(f"{trainer.step} steps, {trainer.run.config.compute.bf16=}")
"""


@pytest.mark.slow
def test_the_function_returns_the_trainer_and_the_model(folder):
    (folder / "snippet.yaml").write_text(CONFIG.replace("output_dir: out", "output_dir: called"), encoding="utf-8")
    (printed,) = finish(start(folder, "-c", SNIPPET))
    assert "4 steps, trainer.run.config.compute.bf16=True" in printed
    assert (folder / "called" / "stage1" / "finished.json").is_file()
