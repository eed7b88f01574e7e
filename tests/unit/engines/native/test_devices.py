"""Which of the visible devices a process takes; no accelerator is needed, nor started."""

import pytest
import torch

from torchacc import Config, ConfigError
from torchacc.engines.native import native_engine
from torchacc.env import read_job

SRUN = {"PROCID": "1", "STEP_NUM_TASKS": "4", "LOCALID": "1", "STEP_TASKS_PER_NODE": "4"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.fixture
def engine(monkeypatch):
    """Return a function that makes the engine of a process which sees so many GPUs."""

    def make(variables, num_visible):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(native_engine, "accelerator_kind", lambda: "cuda")
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_visible)
        return native_engine.NativeEngine(config=Config(), mesh=None, job=read_job())

    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    return make


@pytest.mark.parametrize(("num_visible", "index"), [(1, 0), (4, 1)])
def test_a_process_of_srun_takes_its_own_device_whether_it_sees_the_others_or_not(engine, num_visible, index):
    found = engine({f"SLURM_{name}": value for name, value in SRUN.items()}, num_visible)
    found._check_devices()
    assert found.device == torch.device("cuda", index)


def test_a_launcher_with_more_processes_than_devices_is_refused(engine):
    with pytest.raises(ConfigError, match=r"the launcher started 4 processes on this machine, .* sees 1 .*torchrun"):
        engine(TORCHRUN, 1)._check_devices()


def test_srun_with_more_tasks_than_the_devices_that_each_sees_is_refused(engine):
    with pytest.raises(ConfigError, match=r"srun started 4 .* sees 2 cuda devices.*--gpus-per-task=1"):
        engine({f"SLURM_{name}": value for name, value in SRUN.items()}, 2)._check_devices()
