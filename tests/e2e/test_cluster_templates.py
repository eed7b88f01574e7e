"""The templates in examples/cluster, started for real as two machines would start them, over loopback."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from tests import forkrun

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "examples" / "cluster"
SECONDS = 200
COMMANDS = {
    "python": 'exec "$PYTHON" "$@"\n',
    "torchacc": 'exec "$PYTHON" -m torchacc "$@"\n',
    "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"\n',
    # SLURM, as far as the template asks for it: two machines, each of which runs the command once.
    "scontrol": "echo 127.0.0.1; echo node1\n",
    "srun": 'shift\nSLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@" & wait -n; wait -n\n',
}


@pytest.fixture
def environment(tmp_path):
    """Commands of this checkout, and the tiny script, which writes what each process has found."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\nset -e\n{text}")
        (commands / name).chmod(0o755)
    shutil.copy(Path(__file__).with_name("cluster_script.py"), tmp_path / "train.py")
    return {
        **forkrun.environment(),
        "PYTHON": forkrun.python("torch_xla"),
        "PATH": os.pathsep.join([str(commands), os.environ["PATH"]]),
        "TMPDIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_PORT": forkrun.free_port(),
        "BACKEND": "native",
        "OUT": str(tmp_path / "out"),
    }


def run(*commands: tuple[list[str], dict[str, str]], folder: Path) -> None:
    """Run commands at once, each with its environment, and wait for their end."""
    processes = [
        subprocess.Popen(
            command, env=variables, cwd=folder, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for command, variables in commands
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)


def check(folder: Path, *, local_ranks: list[int], arguments: list[str]) -> None:
    """Check that all processes were one job, whose losses are those of the unsharded run."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("out-*.json"))]
    assert [process["local_rank"] for process in found] == local_ranks
    for process in found:
        assert process["size"] == len(local_ranks)
        assert process["arguments"] == arguments
        assert process["losses"] == pytest.approx(unsharded_losses(), rel=1e-6)


def unsharded_losses() -> list[float]:
    torch.manual_seed(0)
    linear = nn.Linear(3, 4)
    rows = torch.stack([torch.randn(3) for _ in range(8)])
    optimizer, losses = torch.optim.SGD(linear.parameters(), lr=0.1), []
    for batch in rows.split(4):
        optimizer.zero_grad()
        loss = linear(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def containers(template: str) -> list[dict]:
    """Return the containers of a template, one for each kind of pod."""
    found = []
    for document in yaml.safe_load_all((TEMPLATES / template).read_text(encoding="utf-8")):
        if document["kind"] == "Job":
            found.append(document["spec"]["template"]["spec"]["containers"][0])
        elif document["kind"] == "JobSet":
            found += [job["template"]["spec"]["template"]["spec"]["containers"][0] for job in replicated_jobs(document)]
        elif document["kind"] == "PyTorchJob":
            replicas = document["spec"]["pytorchReplicaSpecs"]
            assert sum(pods["replicas"] for pods in replicas.values()) == 2
            found += [pods["template"]["spec"]["containers"][0] for pods in replicas.values()]
    return found


def replicated_jobs(job_set: dict) -> list[dict]:
    return job_set["spec"]["replicatedJobs"]


def known_to_kubernetes(document: dict) -> list[dict]:
    """Return what Kubernetes itself reads of a document: the document, or what an operator makes of it."""
    if document["kind"] == "JobSet":
        jobs = replicated_jobs(document)
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **job["template"]} for job in jobs]
    if document["kind"] == "PyTorchJob":
        replicas = document["spec"]["pytorchReplicaSpecs"].values()
        pods = [{**pods["template"], "metadata": {"name": "pod"}} for pods in replicas]
        return [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": pod} for pod in pods]
    return [document]


def strict(schema: dict) -> dict:
    """Return an OpenAPI schema that refuses fields it does not name, which a cluster would drop with a warning."""
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema = {"additionalProperties": False, **schema}
    return {
        key: {name: strict(inner) for name, inner in value.items()} if key == "properties"
        else strict(value) if key in ("items", "additionalProperties") and isinstance(value, dict)
        else value
        for key, value in schema.items()
    }  # fmt: skip


def pod(container: dict, environment: dict[str, str], **given: str) -> tuple[list[str], dict[str, str]]:
    """Return what a pod runs, and where: its template's variables, under those that a cluster gives it."""
    own = {variable["name"]: variable["value"] for variable in container["env"]}
    assert all(isinstance(value, str) for value in own.values()), "a pod's variables are strings"
    return [*container["command"], *container["args"]], {**own, **environment, "GPUS": "1", **given}


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.s*")), ids=lambda path: path.name)
def test_a_shell_template_is_bash(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.yaml")), ids=lambda path: path.name)
def test_what_kubernetes_gets_is_of_its_schema(path):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        for known in known_to_kubernetes(document):
            kubernetes_validate.validate(known, kubernetes_validate.latest_version(), strict=True)


def test_what_the_controller_of_jobsets_gets_is_of_its_schema(pytestconfig):
    if not pytestconfig.getoption("--jobset-crd"):
        pytest.skip("needs --jobset-crd FILE, JobSet's CustomResourceDefinition")
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    definition = yaml.safe_load(Path(pytestconfig.getoption("--jobset-crd")).read_text(encoding="utf-8"))["spec"]
    document = yaml.safe_load((TEMPLATES / "jobset.yaml").read_text(encoding="utf-8"))
    group, version = document["apiVersion"].split("/")
    assert (group, document["kind"]) == (definition["group"], definition["names"]["kind"])
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in definition["versions"] if v["served"] and v["name"] == version]
    jsonschema.Draft202012Validator(strict(schema)).validate(document)


@pytest.mark.slow
def test_slurm(environment, tmp_path):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    command = ["bash", str(TEMPLATES / "slurm.sbatch"), "train.py", "--lr", "1e-3"]
    run((command, {**environment, **slurm, "SLURM_GPUS_ON_NODE": "2"}), folder=tmp_path)
    check(tmp_path, local_ranks=[0, 1, 0, 1], arguments=["--lr", "1e-3"])


@pytest.mark.slow
@pytest.mark.parametrize("template", ["kubernetes-job.yaml", "jobset.yaml"])
def test_indexed_job(environment, tmp_path, template):
    (container,) = containers(template)
    here = {"MASTER_ADDR": "127.0.0.1"}
    run(*(pod(container, environment, JOB_COMPLETION_INDEX=str(n), **here) for n in range(2)), folder=tmp_path)
    check(tmp_path, local_ranks=[0, 0], arguments=[])


@pytest.mark.slow
def test_pytorchjob(environment, tmp_path):
    here = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    pods = enumerate(containers("pytorchjob.yaml"))
    run(*(pod(container, environment, RANK=str(rank), **here) for rank, container in pods), folder=tmp_path)
    check(tmp_path, local_ranks=[0, 0], arguments=[])


@pytest.mark.slow
@pytest.mark.xla
def test_tpu_slice(environment, tmp_path):
    tpu = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2", "CHIPS": "1"}
    here = {**environment, **tpu, "PJRT_DEVICE": "CPU", "BACKEND": "xla"}
    command = [str(TEMPLATES / "tpu_slice.sh"), "train.py", "--lr", "1e-3"]
    run(*((command, {**here, "TPU_WORKER_ID": str(n)}) for n in range(2)), folder=tmp_path)
    check(tmp_path, local_ranks=[0, 0], arguments=["--lr", "1e-3"])
