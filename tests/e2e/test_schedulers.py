"""Jobs of SLURM, Open MPI and Ray Train, each with its real programs and daemons, on this machine."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import forkrun

HERE = Path(__file__).parent
TRAINING = HERE / "launched_training.py"
SBATCH = HERE.parents[1] / "examples" / "cluster" / "slurm.sbatch"
NUM_STEPS = 10
SECONDS = 300

pytestmark = pytest.mark.slow

needs_mpi = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
needs_slurm = pytest.mark.skipif(
    not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))),
    reason="needs SLURM's slurmctld, slurmd and srun, and munged",
)
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[train]")
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
KillWait=5
GresTypes=gpu
NodeName=node[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{nodes}] CPUs=4 RealMemory=1000 Gres=gpu:2
PartitionName=main Nodes=node[0-1] Default=YES State=UP
"""
"""Two nodes, which are two daemons of this machine, with files that stand for GPUs."""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a job: `python` and `torchacc` are those of this checkout, and nothing tells a rank."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, words in {"python": "", "torchacc": "-m torchacc"}.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (commands / name).chmod(0o755)
    found = forkrun.environment(CUDA_VISIBLE_DEVICES="", OUT=str(folder / "out"), BACKEND="native", **variables)
    started = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "OMPI_")
    found = {name: value for name, value in found.items() if name in variables or not name.startswith(started)}
    return {**found, "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]), "TMPDIR": str(folder)}


def run(*command: object, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], env=env, cwd=folder, timeout=SECONDS, capture_output=True, text=True
    )


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[") and line.endswith("]")]
    return json.loads(line)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The losses of a run that nobody disturbs, in one process."""
    folder = tmp_path_factory.mktemp("alone")
    command = (sys.executable, TRAINING, "none", "native", NUM_STEPS, folder)
    return losses_of(run(*command, env=environment(folder), folder=folder))


def wait_until(is_so, what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of two nodes; what is to be in the environment of its commands."""
    folder = tmp_path_factory.mktemp("slurm")
    port = int(forkrun.free_port())
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(
        SLURM_CONF.format(
            folder=folder, host=host, port=port, nodes=f"{port + 1}-{port + 2}", user=os.environ.get("USER", "root")
        )
    )
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    for name in ("state", "spool-node0", "spool-node1"):
        (folder / name).mkdir()
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"]
    munged += [f"--{kind}-file={folder}/munged.{kind}" for kind in ("pid", "log", "seed")]
    daemons = []
    try:
        with (folder / "daemons.log").open("w") as log:
            for command in (
                munged,
                ["slurmctld", "-D"],
                ["slurmd", "-D", "-N", "node0"],
                ["slurmd", "-D", "-N", "node1"],
            ):
                daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
                if command is munged:
                    wait_until((folder / "munge.socket").exists, "munged has not started")

        def idle() -> bool:
            done = run("sinfo", "--noheader", "--format=%D %t", env=env, folder=folder)
            return done.stdout.split() == ["2", "idle"]

        wait_until(idle, f"SLURM has not started: {(folder / 'daemons.log').read_text()}")
        yield {"SLURM_CONF": env["SLURM_CONF"]}
    finally:
        subprocess.run(["scancel", "--state=RUNNING"], env=env, capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)


@needs_slurm
def test_srun_starts_the_script_without_a_launcher(slurm, tmp_path, expected):
    command = ("python", TRAINING, "none", "native", NUM_STEPS, tmp_path)
    env = environment(tmp_path, **slurm)
    done = run("srun", "--nodes=1", "--ntasks=2", *command, env=env, folder=tmp_path)
    assert losses_of(done) == pytest.approx(expected, rel=1e-5)


@needs_slurm
def test_srun_on_several_machines_needs_to_be_told_where_they_meet(slurm, tmp_path, expected):
    command = ("srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=1", "python", TRAINING, "none", "native")
    done = run(*command, NUM_STEPS, tmp_path, env=environment(tmp_path, **slurm), folder=tmp_path)
    assert done.returncode != 0
    assert "1 of them on this machine, and MASTER_ADDR does not say where they meet" in done.stderr
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": forkrun.free_port()}
    told = run(*command, NUM_STEPS, tmp_path, env=environment(tmp_path, **slurm, **here), folder=tmp_path)
    assert losses_of(told) == pytest.approx(expected, rel=1e-5)


@needs_slurm
def test_srun_that_starts_two_launchers_on_a_machine_is_refused(slurm, tmp_path):
    command = ("srun", "--nodes=1", "--ntasks=2", "torchacc", "launch", "-n", 2, TRAINING)
    done = run(*command, env=environment(tmp_path, **slurm), folder=tmp_path)
    assert done.returncode != 0
    assert "srun has started 2 of `torchacc launch` on this machine" in done.stdout + done.stderr


@needs_slurm
def test_a_job_of_the_template_saves_upon_sigterm_and_goes_on_when_it_is_submitted_again(slurm, tmp_path, expected):
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": forkrun.free_port()}  # no name of a node is known here
    env = environment(tmp_path, **slurm, **here)
    options = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-task=3", "--job-name=train"]
    command = ["sbatch", "--wait", "--parsable", *options, SBATCH, TRAINING, "wait", "native", NUM_STEPS, tmp_path]
    with subprocess.Popen(list(map(str, command)), env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as first:
        try:
            wait_until(lambda: list(tmp_path.glob("checkpoints/*/manifest.json")), "the job has saved nothing")
            stopped = run("scancel", "--signal=TERM", "--name=train", env=env, folder=tmp_path)
            assert (stopped.returncode, first.wait(SECONDS)) == (0, 143), stopped.stderr
        finally:
            subprocess.run(["scancel", "--name=train"], env=env, capture_output=True)
    again = run(*command, env=env, folder=tmp_path)
    log = tmp_path / f"train-{again.stdout.strip()}.log"
    assert again.returncode == 0, log.read_text()
    again.stdout = log.read_text()
    assert losses_of(again) == pytest.approx(expected, rel=1e-5)
    assert (tmp_path / "starts-3").read_text().split() == ["4", "4"]


def mpirun(folder: Path, num_ranks: int, *command: object) -> subprocess.CompletedProcess[str]:
    options = ["--oversubscribe", "-n", num_ranks, *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    return run("mpirun", *options, "python", *command, env=environment(folder), folder=folder)


@needs_mpi
def test_mpirun_starts_the_script_without_a_launcher(tmp_path, expected):
    done = mpirun(tmp_path, 2, TRAINING, "none", "native", NUM_STEPS, tmp_path)
    assert losses_of(done) == pytest.approx(expected, rel=1e-5)
    assert (tmp_path / "starts-1").read_text().split() == ["2"]


@needs_mpi
def test_a_worker_that_dies_ends_the_job_of_mpirun_which_goes_on_in_one_process(tmp_path, expected):
    done = mpirun(tmp_path, 2, TRAINING, "crash", "native", NUM_STEPS, tmp_path)
    assert done.returncode != 0
    again = run("python", TRAINING, "crash", "native", NUM_STEPS, tmp_path, env=environment(tmp_path), folder=tmp_path)
    assert losses_of(again) == pytest.approx(expected, rel=1e-5)


@needs_ray
@pytest.mark.parametrize(("fault", "starts"), [("none", 1), ("crash", 2)])
def test_ray_train_starts_the_script_and_starts_it_again_where_a_worker_dies(tmp_path, expected, fault, starts):
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:  # as the names of Ray's sockets are long
        command = (sys.executable, HERE / "ray_script.py", short, TRAINING, fault, "native", NUM_STEPS, tmp_path)
        done = run(*command, env=environment(tmp_path), folder=tmp_path)
    assert losses_of(done) == pytest.approx(expected, rel=1e-5), done.stderr
    assert (tmp_path / "starts-1").read_text().split() == ["2"] * starts
