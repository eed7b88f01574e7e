import json
import platform
import subprocess

import pytest
import torch

from tests import forkrun
from torchacc.cli import env_command, main
from torchacc.engines import registry
from torchacc.errors import ConfigError

KINDS = ["native", "xla-multiprocess", "xla-spmd"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [forkrun.python("torch_xla"), "-m", "torchacc", *arguments],
        env=forkrun.environment(**environment),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.fixture(scope="module")
def found():
    done = run("env", "--json", PJRT_DEVICE="CPU")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_versions_are_those_of_this_python(found):
    assert found["python"] == platform.python_version()
    assert torch.__version__.startswith(found["packages"]["torch"])
    assert found["cores"] >= 1


@pytest.mark.slow
def test_every_engine_says_what_it_runs_on_or_why_it_cannot(found):
    assert [engine["name"] for engine in found["engines"]] == KINDS
    assert all((engine["devices"] is None) == bool(engine["reason"]) for engine in found["engines"])
    native = found["engines"][0]
    assert (native["devices"] == "CPU") == (not torch.accelerator.is_available())


@pytest.mark.slow
@pytest.mark.xla
def test_xla_runs_where_torch_xla_is_installed(found):
    assert [engine["devices"] for engine in found["engines"] if engine["name"].startswith("xla")] == ["CPU", "CPU"]
    assert found["auto"] == ("native" if torch.accelerator.is_available() else "xla-spmd")


@pytest.mark.slow
@pytest.mark.xla
def test_an_engine_that_cannot_run_says_why_in_words():
    done = run("env", PJRT_DEVICE="CUDA", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert "xla-spmd          cannot run\n" in done.stdout
    assert "no plugin is installed" in done.stdout or "No visible GPU devices" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_variables_are_shown_and_secrets_are_not(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_this=1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    schedulers = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE")
    for name in schedulers:
        monkeypatch.setenv(name, "1")
    for secret in ("HF_TOKEN", "NCCL_AUTH", "TORCH_API_KEY", "SLURM_PASSWORD"):
        monkeypatch.setenv(secret, "hidden")
    found = env_command.with_prefixes(*env_command._VARIABLES)
    assert found["XLA_FLAGS"] == "--xla_this=1"
    assert {"TOKENIZERS_PARALLELISM", *schedulers} <= found.keys()
    assert "hidden" not in found.values()


def test_gpus_are_those_that_the_driver_lists(monkeypatch):
    for program, gpus in (("echo 0, A GPU, 80 GiB, 570", ["0, A GPU, 80 GiB, 570"]), ("false", []), ("/no/such", [])):
        monkeypatch.setattr(env_command, "_GPU_QUERY", tuple(program.split(maxsplit=1)))
        assert env_command._gpus() == gpus


def test_an_engine_whose_process_dies_is_reported(monkeypatch):
    monkeypatch.setattr(registry, "_PROGRAM", "import sys; sys.stderr.write('no driver\\n'); sys.exit(3)")
    found = registry.survey()
    assert {finding.reason for finding in found} == {"its process ended with status 3: no driver"}
    assert {finding.devices for finding in found} == {None}


def test_an_engine_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(registry, "_PROGRAM", "import time; time.sleep(100)")
    assert registry.survey(timeout_secs=0.5)[0].reason == "it found no devices in 0.5 s"


def test_an_error_is_a_line_and_a_status(monkeypatch, capsys):
    def fail(args):
        raise ConfigError("this cannot be: write that")

    monkeypatch.setattr(env_command, "run", fail)
    assert main.main(["env"]) == 2
    assert capsys.readouterr().err == "error: this cannot be: write that\n"


def test_a_command_that_is_none_is_refused_with_those_that_are(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["enw"])
    assert ended.value.code == 2
    assert "'env'" in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    assert "launch and supervise the processes of a job" in " ".join(capsys.readouterr().out.split())
