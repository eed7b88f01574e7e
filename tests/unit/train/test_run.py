"""What the command refuses, and what it decides, before any process is started; the runs are in tests/e2e."""

import socket
from pathlib import Path

import pytest

from torchacc.cli.main import main
from torchacc.errors import ConfigError
from torchacc.train import train_production_mode
from torchacc.train.run import as_arguments

FILE = """
output_dir: out
training_stages:
  one:
    training: {max_steps: 3}
    distributed: {engine: native, devices: 2}
distributed_examples:
  nodes: {engine: native, num_nodes: 2, devices: 2}
model_config_small: {model_type: gpt2, n_layer: 2}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PJRT_SELECT_DEFAULT_DEVICE", "0")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def refusal(capsys, folder):
    """Return a function that runs the command, which has to fail without leaving a trace, and returns its message."""

    def refusal(*arguments):
        assert main(["train", *arguments]) == 2
        assert [path.name for path in folder.iterdir()] == ["config.yaml"]
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert "Traceback" not in err
        return err

    return refusal


def test_a_dry_run_prints_the_plan_and_leaves_nothing(capsys, folder):
    assert main(["train", "--dry-run", "--precision", "bf16-mixed"]) == 0
    plan = capsys.readouterr().out
    assert "devices     2, engine native, 2 processes on one machine\n" in plan
    assert "precision   bfloat16, parameters in float32\n" in plan
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_a_dry_run_says_that_the_folder_is_taken_and_leaves_it(capsys, folder):
    taken = folder / "out" / "one"
    taken.mkdir(parents=True)
    (taken / "thesis.txt").write_text("mine")
    assert main(["train", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "devices     2" in printed.out
    assert "holds thesis.txt, and no run.json" in printed.err
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=none.yaml"], "none.yaml: there is no such file"),
        (["--stage=two"], "there is no stage 'two'"),
        (["--devices=0"], "distributed.devices = 0: expected at least 1 or 'auto'"),
        (["--precision=half"], "precision 'half' is not one of 32"),
        (["--fsdp-config=nodes"], "--node-rank, or by the variable RANK, which is not set"),
        (["--fsdp-config=nodes", "--node-rank=2"], "from 0 to 1, is said by --node-rank"),
        (["--fsdp-config=nodes", "--node-rank=0"], "needs master_addr"),
        (["--fsdp-config=nodes", "--node-rank=0", "--master-addr=127.0.0.1"], "and master_port"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(refusal, arguments, message):
    assert message in refusal(*arguments)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "4"}, "the variable RANK, and is 4"),
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "8"}, "WORLD_SIZE=8 is set, and the run has 4 devices on 2 machines"),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
            "run the command once on each machine",
        ),
    ],
)
def test_variables_that_are_set_by_hand_are_about_machines(refusal, monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert message in refusal("--fsdp-config=nodes")


def test_a_port_that_is_in_use_is_told(refusal):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        where = ["--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}"]
        assert f"port {port} cannot be used" in refusal("--fsdp-config=nodes", *where)


def test_an_unknown_mode_is_refused_with_the_choices(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--mode", "development"])
    assert "invalid choice: 'development' (choose from" in capsys.readouterr().err


def test_a_launcher_with_other_processes_than_the_run_is_refused(refusal, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert "pass --num-nodes 1 --devices 3" in refusal()
    for option in ("--overwrite", "--max-restarts=1", "--heartbeat-secs=9"):
        assert "are for what starts the processes" in refusal(option, "--devices=3")


def test_a_run_that_needs_processes_tells_a_script_how_to_get_them():
    with pytest.raises(ConfigError, match="torchacc launch --nproc 2 your_script.py"):
        train_production_mode("model_config_small", "one", devices=8)
    assert not Path("out").exists()


def test_a_script_that_srun_starts_is_one_of_its_processes(monkeypatch):
    for name, value in {"PROCID": "1", "STEP_NUM_TASKS": "3", "LOCALID": "1", "STEP_TASKS_PER_NODE": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(ConfigError, match="has started 3 processes, 3 of them on this machine, and the run has 1"):
        train_production_mode()


def test_arguments_reach_the_processes_but_for_those_that_are_not_given():
    assert as_arguments({"num_nodes": 2, "fsdp_config": "nodes", "stage": None}) == [
        "--num-nodes=2",
        "--fsdp-config=nodes",
    ]
