"""Jobs that `torchacc launch` starts: their ends, and what is left of them."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import forkrun

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("launched_script.py"))
TRAINING = str(Path(__file__).with_name("launched_training.py"))
NUM_STEPS = 10
STAGE = """
output_dir: {folder}/runs
training_stages:
  stage1:
    model_config: model_config_tiny
    data: {{dataset: text, files: {text}, vocab_size: 300, block_size: 16, cache_dir: {folder}/cache}}
    training: {{batch_size: 1, max_steps: 100, save_every_steps: 10, eval_every_steps: null}}
    distributed: {{devices: 2, engine: native}}
model_config_tiny: {{model_type: gpt2, n_layer: 2, n_head: 2, n_embd: 16, n_positions: 32}}
"""
SECONDS = 200


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    """What a launcher keeps of a failed job goes with the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def environ() -> dict[str, str]:
    return forkrun.environment(CUDA_VISIBLE_DEVICES="")  # more processes than a machine has GPUs


def start(
    *arguments: object, command: str = "launch", forks: bool = False, cwd: Path | None = None
) -> subprocess.Popen[str]:
    """Start a command of torchacc; with `forks` it and its ranks are those of forkrun.py, with PyTorch imported."""
    python = forkrun.python() if forks else sys.executable
    return subprocess.Popen(
        [python, "-m", "torchacc", command, *map(str, arguments)],
        env=environ(),
        cwd=cwd,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Where the tests run in the background of a shell, Ctrl-C is ignored, and the launcher would leave it so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def launch(*arguments: object, forks: bool = False) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, forks=forks)
    out, err = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def pids_in(folder: Path, count: int) -> list[int]:
    """Wait until so many ranks run, and return their process ids."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found = [path.read_text() for path in folder.glob("pid-*")]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    raise AssertionError(f"not all ranks have started: {found}")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def losses_in(out: str) -> list[float]:
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run in one process, without a launcher."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = forkrun.run(TRAINING, "nothing", "native", NUM_STEPS, folder, env=environ(), timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    losses = losses_in(done.stdout)
    assert len(losses) == NUM_STEPS
    return losses


def test_a_job_runs_and_shows_rank_0(tmp_path):
    done = launch("-n", 3, "--log-dir", tmp_path / "logs", SCRIPT, "end", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 3\n"
    assert len(pids_in(tmp_path, 3)) == 3
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").glob("*/attempt-0/rank-*.stdout.log")}
    assert logs == {f"rank-{rank}.stdout.log": f"rank {rank} of 3\n" for rank in range(3)}


@pytest.mark.parametrize(
    ("told", "status", "words", "options"),
    [
        ("raise", 1, "ValueError: rank one has had enough\ntorchacc launch: rank 1 on ", ["--all-ranks"]),
        ("fault", 139, "Fatal Python error: Segmentation fault", []),
        ("kill", 137, "was killed (SIGKILL)", []),
        ("misuse", 2, "failed with exit status 2", ["--max-restarts", 3]),
    ],
)
def test_one_rank_ends_all_and_is_named(tmp_path, told, status, words, options):
    # What a fork starts is not of its client's group, by which the launcher ends a rank's children.
    done = launch("-n", 2, *options, SCRIPT, told, tmp_path, forks=told != "raise")
    assert done.returncode == status
    assert words in done.stderr
    assert f"torchacc launch: rank 1 on {socket.gethostname()} " in done.stderr
    assert "torchacc launch: restart" not in done.stderr
    prefixed = "".join(f"[rank {rank}] rank {rank} of 2\n" for rank in range(2))
    shown = "".join(sorted(done.stdout.splitlines(keepends=True)))
    assert shown == (prefixed if "--all-ranks" in options else "rank 0 of 2\n")
    children = [int(path.read_text()) for path in tmp_path.glob("child")]  # of a rank
    wait_until_gone([*pids_in(tmp_path, 2), *children])


def test_a_rank_that_left_the_others_is_named(tmp_path):
    done = launch("-n", 2, SCRIPT, "leave", tmp_path, forks=True)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-3:]
    assert said[0].startswith("torchacc launch: rank 0 on ")
    assert said[1].startswith("torchacc launch: rank 1 had ended before, with exit status 0: ")


def test_an_error_of_all_ranks_is_printed_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torchacc\n"
        "config = torchacc.Config(backend='native')\n"
        "config.dist.fsdp.size = 2\n"
        "torchacc.accelerate(torch.nn.Linear(2, 2), None, config)\n"
    )
    done = launch("-n", 3, script, forks=True)
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.count("torchacc.errors.ConfigError: ") == 1
    assert "torchacc launch: rank 0 on " in done.stderr


def test_a_signal_lets_every_rank_save(tmp_path):
    process = start("-n", 2, SCRIPT, "save", tmp_path)
    pids = pids_in(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 143, err
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert "Traceback" not in err
    wait_until_gone(pids)


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    process = start("-n", 2, SCRIPT, "sleep", tmp_path)
    pids = pids_in(tmp_path, 2)
    process.kill()
    process.communicate(timeout=SECONDS)
    wait_until_gone(pids)


def test_arguments_output_and_input_pass_as_they_are(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "print(sys.argv[1:], repr(sys.stdin.read()))\n"
        "ends = time.monotonic() + 60\n"
        "while not pathlib.Path(__file__).with_name('seen').exists():\n"
        "    assert time.monotonic() < ends\n"
        "    time.sleep(0.05)\n"
    )
    words = ["${local_rank}", "$local_rank", "$$", "a$b", "$"]
    process = start("-n", 2, "--log-dir", tmp_path / "logs", script, *words, forks=True)
    process.stdin.write("typed")
    process.stdin.close()
    assert process.stdout.readline() == f"{words} 'typed'\n"  # at once, and not when it ends
    (tmp_path / "seen").touch()
    assert process.wait(SECONDS) == 0
    (log,) = tmp_path.glob("logs/*/attempt-0/rank-1.stdout.log")
    assert log.read_text() == f"{words} ''\n"


def test_a_wrong_count_is_one_line_and_status_2(tmp_path):
    done = launch("-n", 0, SCRIPT, "end", tmp_path, forks=True)
    assert done.returncode == 2
    assert done.stderr == "error: num_processes = 0: write a whole number of 1 or more\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_hung_rank_is_named_and_the_job_goes_on_with_fewer(tmp_path, undisturbed):
    """Rank 1 hangs; restarted, it fails at the same step; with one process the run comes through."""
    options = ["--heartbeat-secs", 8, "--max-restarts", 3, "--min-nproc", 1]
    done = launch("-n", 2, *options, TRAINING, "hang", "native", NUM_STEPS, tmp_path, forks=True)
    assert done.returncode == 0, done.stderr
    culprit = (
        rf"rank 1 on {socket.gethostname()} has been in the forward pass of step 6 for \d+ s; the others wait for it"
    )
    assert re.search(culprit, done.stderr), done.stderr
    assert re.search(r'launched_training.py", line \d+ in forward\n', done.stderr), done.stderr
    assert "restart 1 of 3, after step 5" in done.stderr
    assert "restart 2 of 3 with 1 processes in place of 2, after step 5" in done.stderr
    assert (tmp_path / "starts-0").read_text().split() == ["2", "2", "1"]
    assert losses_in(done.stdout) == pytest.approx(undisturbed, rel=1e-5)


def test_a_node_that_waits_for_others_says_so(tmp_path):
    port = forkrun.free_port()
    nodes = ["--num-nodes", 2, "--node-rank", 1, "--master-addr", "127.0.0.1", "--master-port", port]
    process = start("-n", 1, *nodes, SCRIPT, "end", tmp_path, forks=True)
    said = process.stderr.readline()
    process.kill()
    process.communicate(timeout=SECONDS)
    waits = f"node 1 waits until the launchers of all 2 nodes are at 127.0.0.1:{port}, each with a node rank of its own"
    assert said == f"torchacc launch: {waits}; for 5 s by now\n"


def test_nodes_of_different_sizes_are_noticed(tmp_path):
    port = forkrun.free_port()
    nodes = ["--num-nodes", 2, "--master-addr", "127.0.0.1", "--master-port", port]
    other = start("-n", 2, *nodes, "--node-rank", 1, SCRIPT, "end", tmp_path, forks=True)
    first = launch("-n", 1, *nodes, "--node-rank", 0, SCRIPT, "end", tmp_path, forks=True)
    assert (first.returncode, other.wait(SECONDS)) == (0, 0), first.stderr
    another = "another launcher was given another number of processes"
    assert f"2 nodes of 1 processes are 2 ranks, and the job has 3: {another}" in first.stderr
    assert f"2 nodes of 2 processes are 4 ranks, and the job has 3: {another}" in other.stderr.read()


def test_what_a_hidden_rank_says_of_itself_is_shown(tmp_path):
    done = launch("-n", 2, SCRIPT, "speak", tmp_path, forks=True)
    assert "torchacc[1]: what is so on rank 1\n" in done.stderr
    assert "a warning of a library's" not in done.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_that_do_not_work_together_are_noticed(processes, tmp_path):
    done = launch("-n", processes, SCRIPT, "end", tmp_path, forks=True)
    assert done.returncode == 0, done.stderr
    assert ("no process has called torchacc.accelerate() or fsdp()" in done.stderr) == (processes > 1)


@pytest.mark.slow
def test_two_nodes_end_and_start_again_together(tmp_path, undisturbed):
    port = forkrun.free_port()
    nodes = ["--num-nodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--max-restarts", 1]
    training = [TRAINING, "crash", "native", NUM_STEPS, tmp_path]
    other = start("-n", 1, *nodes, "--node-rank", 1, *training, forks=True)
    first = launch("-n", 1, *nodes, "--node-rank", 0, *training, forks=True)
    out, err = other.communicate(timeout=SECONDS)
    assert (first.returncode, other.returncode) == (0, 0), first.stderr + err
    assert "have lost a rank of another node" in first.stderr
    assert f"rank 1 on {socket.gethostname()} failed with exit status 9\n" in err
    assert out == ""
    assert losses_in(first.stdout) == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("longer", [0, 1])
def test_a_node_that_ended_well_fails_with_another(longer, tmp_path):
    """The ranks of one node make more steps than those of the other."""
    nodes = ["--num-nodes", 2, "--master-addr", "127.0.0.1", "--master-port", forkrun.free_port()]
    steps = [NUM_STEPS + (4 if rank == longer else 0) for rank in range(2)]
    started = [
        start("-n", 1, *nodes, "--node-rank", rank, TRAINING, "nothing", "native", steps[rank], tmp_path, forks=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=SECONDS)[1] for process in started]
    assert [process.returncode for process in started] == [1, 1], errors
    assert "have lost a rank of another node" in errors[longer]
    assert f"node {longer} failed, and those on {socket.gethostname()} had ended well" in errors[1 - longer]


def test_several_nodes_need_a_rank_of_each(tmp_path):
    nodes = ["--num-nodes", 2, "--master-addr", "127.0.0.1", "--master-port", forkrun.free_port()]
    done = launch("-n", 1, *nodes, SCRIPT, "end", tmp_path, forks=True)
    assert done.returncode == 2
    assert "--num-nodes 2 needs --node-rank, which of the machines this is: 0 where --master-addr is" in done.stderr


@pytest.mark.slow
def test_nodes_without_a_common_disk_end_together(tmp_path):
    nodes = ["--num-nodes", 2, "--master-addr", "127.0.0.1", "--master-port", forkrun.free_port()]
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        (folder / "run").mkdir(parents=True)
    started = [
        start("-n", 1, *nodes, "--node-rank", rank, TRAINING, "nothing", "native", NUM_STEPS, "run", cwd=folder)
        for rank, folder in enumerate(folders)
    ]
    for process in started:
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 1, err
        assert "Save to a file system that all machines share" in err


@pytest.mark.slow
@pytest.mark.xla
def test_a_run_on_xla_that_ctrl_c_ends_goes_on(tmp_path, undisturbed):
    process = start("-n", 2, TRAINING, "wait", "xla", 10**6, tmp_path, forks=True)
    checkpoints = tmp_path / "checkpoints"
    wait_for(checkpoints / "step-00000002" / "manifest.json")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert "SIGINT: all processes are asked to save and end" in err
    saved = max(path.name for path in checkpoints.iterdir())
    num_steps = int(saved.removeprefix("step-")) + 2
    done = launch("-n", 2, TRAINING, "nothing", "xla", num_steps, tmp_path, forks=True)
    assert done.returncode == 0, done.stderr
    assert f"restored {checkpoints / saved}" in done.stderr
    losses = losses_in(done.stdout)
    assert len(losses) == num_steps
    assert losses[:NUM_STEPS] == pytest.approx(undisturbed[:num_steps], rel=1e-5)


@pytest.mark.slow
def test_a_stage_goes_on_when_one_of_its_ranks_is_killed(tmp_path):
    (tmp_path / "config.yaml").write_text(STAGE.format(folder=tmp_path, text=ROOT / "docs" / "launch.md"))
    process = start("--max-restarts", 1, "--config", tmp_path / "config.yaml", command="train", forks=True)
    wait_for(tmp_path / "runs" / "stage1" / "checkpoints" / "step-00000010" / "manifest.json")
    own = {"TMPDIR": str(tmp_path), "RANK": "1"}.items()
    (rank1,) = (each for each in psutil.process_iter(["environ"]) if own <= (each.info["environ"] or {}).items())
    rank1.kill()
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert f"rank 1 on {socket.gethostname()} was killed (SIGKILL)" in err
    assert "restart 1 of 1, after step " in err
    assert "torchacc: restored " in err
    assert "finished at step 100/100" in err
    assert "Connection" not in err  # what the other rank would say of it
