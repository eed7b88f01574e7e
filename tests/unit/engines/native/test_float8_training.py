"""`compute.fp8` computes what torchao does by hand, to the last digit, and is refused where it cannot be had."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests import forkrun
from torchacc.config import Config, resolve
from torchacc.engines.native import float8_training
from torchacc.env import Job
from torchacc.errors import ConfigError

PROGRAM = Path(__file__).with_name("float8_program.py")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@needs_torchao
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_numbers_are_torchaos(num_ranks, tmp_path):
    done = forkrun.run(PROGRAM, tmp_path, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(num_ranks):
        found = json.loads((tmp_path / str(rank) / "found.json").read_text())
        assert found
        failed = {case: why for case, why in found.items() if why is not None}
        assert not failed, "\n".join(f"rank {rank}, {case}: {why}" for case, why in failed.items())


def resolved(compute, **sections):
    config = Config.from_dict({"compute": {"bf16": True, **compute}, **sections})
    return resolve(config, Job(num_processes=2, local_num_processes=2), num_devices=2)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ({"bf16": False, "fp8": True}, r"compute\.fp8 = True with compute\.bf16 = False"),
        ({"bf16": False, "fp16": True, "fp8": True}, r"compute\.fp8 = True with compute\.bf16 = False"),
        ({"fp8_recipe": "rowwise"}, r"fp8_recipe = 'rowwise' says how layers compute in float8, and compute\.fp8 is F"),
        ({"fp8_emulate": True}, r"fp8_emulate = True says how layers compute in float8"),
        ({"fp8": True, "fp8_recipe": "row"}, r"fp8_recipe = 'row'.*'tensorwise' or 'rowwise'"),
    ],
    ids=["float32", "float16", "recipe", "emulated", "unknown-recipe"],
)
def test_options_that_contradict_each_other_are_refused(compute, message):
    with pytest.raises(ConfigError, match=message):
        resolved(compute)


def test_tensor_parallelism_is_refused():
    config = resolved({"fp8": True, "fp8_emulate": True}, dist={"tp": {"size": 2}})
    with pytest.raises(ConfigError, match=r"compute\.fp8 = True with dist\.tp\.size = 2 is not available"):
        float8_training.check(config, CPU)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("no", name="torchao"), r"which is not installed: `pip install 'torchacc\[fp8\]'`"),
        (ImportError("no Float8TrainingTensor", name="torchao.float8"), r"has not what torchacc knows of it \(no Floa"),
    ],
    ids=["missing", "another"],
)
def test_torchao_that_is_not_there_is_named(error, message, monkeypatch):
    def fail(name):
        raise error

    monkeypatch.setattr(float8_training.importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=rf"compute\.fp8 = True needs torchao, .*{message}"):
        float8_training.check(resolved({"fp8": True, "fp8_emulate": True}), CPU)


@pytest.mark.parametrize(
    ("device", "capability", "message"),
    [
        (CPU, None, "its device is a CPU, which has no products in float8.*fp8_emulate"),
        (GPU, (8, 6), r"its GPU has the compute capability 8\.6, and products in float8 need 8\.9"),
        (torch.device("xpu", 0), None, "its device is xpu, and torchacc knows float8 on NVIDIA GPUs only"),
    ],
    ids=["cpu", "old-gpu", "others"],
)
def test_devices_without_float8_are_refused_unless_it_is_emulated(device, capability, message, monkeypatch):
    monkeypatch.setattr(float8_training, "_check_torchao", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=message):
        float8_training.check(resolved({"fp8": True}), device)
    float8_training.check(resolved({"fp8": True, "fp8_emulate": True}), device)


def test_gpus_that_have_float8_are_taken(monkeypatch):
    monkeypatch.setattr(float8_training, "_check_torchao", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    float8_training.check(resolved({"fp8": True}), GPU)
