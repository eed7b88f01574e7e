"""What accelerate() refuses before it starts anything, each with the way out."""

import functools
import importlib.metadata
import re

import pytest
import torch
from torch import nn

import torchacc
from torchacc.engines import registry
from torchacc.engines.xla import runtime


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def make_model():
    return nn.Sequential(Block(), Block())


def make_config(**fsdp):
    return torchacc.Config(backend="native", dist={"fsdp": fsdp})


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def start(engine, plan):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(registry, "activate", start)
    monkeypatch.setattr(torchacc.logging, "start_logging", lambda rank: None)


def launched_with(monkeypatch, num_processes):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": num_processes}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))


def test_misspelt_option_names_the_nearest():
    with pytest.raises(torchacc.ConfigError, match=r"sise.*size"):
        make_config(sise=4)


def test_misspelt_class_names_the_nearest():
    with pytest.raises(torchacc.ConfigError, match=r"'Blok'.*did you mean 'Block'"):
        torchacc.accelerate(make_model(), config=make_config(wrap_layer_cls={"Blok"}))


def test_one_process_that_asks_for_four_devices_learns_both_ways_out():
    with pytest.raises(torchacc.ConfigError, match=r"(?s)torchrun --nproc_per_node=4.*use_spmd = True"):
        torchacc.accelerate(make_model(), config=make_config(size=4))


def test_sizes_that_do_not_multiply_show_the_arithmetic(monkeypatch):
    launched_with(monkeypatch, 4)
    with pytest.raises(torchacc.ConfigError, match=r"fsdp\.size = 3, but the job has 4 devices"):
        torchacc.accelerate(make_model(), config=make_config(size=3))


def test_more_devices_than_processes(monkeypatch):
    launched_with(monkeypatch, 2)
    with pytest.raises(torchacc.ConfigError, match=r"fsdp\.size = 8, but the job has 2 devices"):
        torchacc.accelerate(make_model(), config=make_config(size=8))


def test_container_without_forward():
    with pytest.raises(torchacc.ConfigError, match=r"ModuleList has no forward\(\)"):
        torchacc.accelerate(nn.ModuleList([Block()]), config=make_config())


def test_something_that_is_no_model():
    with pytest.raises(torchacc.ConfigError, match=r"takes a torch.nn.Module, and got function"):
        torchacc.accelerate(make_model, config=make_config())


def test_optimizer_of_another_model():
    other = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(torchacc.ConfigError, match="holds no parameter of the model"):
        torchacc.accelerate(make_model(), config=make_config(), optimizer=other)


def test_use_spmd_in_several_processes(monkeypatch):
    launched_with(monkeypatch, 2)
    monkeypatch.setattr(runtime, "check_versions", lambda: None)
    config = torchacc.Config(backend="xla", dist={"fsdp": {"size": 2, "use_spmd": True}})
    with pytest.raises(torchacc.ConfigError, match=r"one process.*start the script with `python`"):
        torchacc.accelerate(make_model(), config=config)


@pytest.mark.parametrize("backend", ["xla", "auto"])
def test_torch_and_torch_xla_that_cannot_load_together(monkeypatch, backend):
    versions = {"torch": "2.13.0", "torch_xla": "2.9.0"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(runtime, "is_installed", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(torchacc.ConfigError, match=r"torch 2.13.0 and torch_xla 2.9.0 cannot load.*torch==2.9.0"):
        torchacc.accelerate(make_model(), config=torchacc.Config(backend=backend))


def test_xla_without_torch_xla(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(torchacc.ConfigError, match="needs torch_xla, which is not installed"):
        torchacc.accelerate(make_model(), config=torchacc.Config(backend="xla"))


def test_users_config_is_left_alone():
    config = make_config(wrap_layer_cls={"Block"})
    before = config.to_dict()
    with pytest.raises(AssertionError, match="an engine was started"):
        torchacc.accelerate(make_model(), config=config)
    assert config.to_dict() == before
    config.dist.fsdp.size = 2


def test_a_model_that_was_not_accelerated():
    with pytest.raises(torchacc.ConfigError, match=r"pass the model that accelerate\(\) returned"):
        torchacc.full_state_dict(make_model())


def test_more_processes_than_accelerators(monkeypatch):
    launched_with(monkeypatch, 4)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(torchacc.ConfigError, match=r"4 processes on this machine, of which this one sees 2 cuda"):
        torchacc.accelerate(make_model(), config=make_config())


def test_prefetch_that_fsdp2_does_not_have():
    with pytest.raises(torchacc.ConfigError, match=r"'BACKWARD_POST' is not available.*'BACKWARD_PRE', or 'NONE'"):
        torchacc.accelerate(make_model(), config=make_config(backward_prefetch="BACKWARD_POST"))


UNDER_XLA = [
    ("compute.fp16", True, r"100 times slower on a CPU.*bf16 = True"),
    ("dist.fsdp.cpu_offload", True, r"part of the device's program.*fsdp\.size.*native"),
    ("memory.offload_activations", True, r"inside of the device's program.*memory.gc = True.*native"),
    ("compute.reduce_dtype", "bfloat16", r"in a dtype of its choice.*Leave it at 'float32'"),
]


@pytest.mark.parametrize(("path", "value", "message"), UNDER_XLA, ids=[path for path, *_ in UNDER_XLA])
def test_levers_that_xla_does_not_have(monkeypatch, path, value, message):
    monkeypatch.setattr(runtime, "check_versions", lambda: None)
    *sections, name = path.split(".")
    config = torchacc.Config(backend="xla")
    setattr(functools.reduce(getattr, sections, config), name, value)
    with pytest.raises(torchacc.ConfigError, match=f"^{re.escape(path)} = .*{message}"):
        torchacc.accelerate(make_model(), config=config)


def test_results_are_not_kept_under_xla(monkeypatch):
    monkeypatch.setattr(runtime, "check_versions", lambda: None)
    config = torchacc.Config(backend="xla", memory={"gc": True, "gc_cls": "Linear", "gc_policy": "save_matmuls"})
    with pytest.raises(torchacc.ConfigError, match=r"^memory\.gc_policy = .*and no single result is kept.*native"):
        torchacc.accelerate(make_model(), config=config)


def test_layers_are_not_split_with_one_xla_process_per_device(monkeypatch):
    launched_with(monkeypatch, 2)
    monkeypatch.setattr(runtime, "check_versions", lambda: None)
    config = torchacc.Config(backend="xla", dist={"tp": {"size": 2, "plan": {"weight": ["tp", None]}}})
    with pytest.raises(torchacc.ConfigError, match=r"dist\.tp\.size = 2.*use_spmd = True"):
        torchacc.accelerate(make_model(), config=config)


def test_outputs_are_split_in_one_way(monkeypatch):
    monkeypatch.setattr(runtime, "check_versions", lambda: None)
    fsdp = {"size": 2, "use_spmd": True, "shard_output_callable": lambda output, mesh: None}
    tp = {"size": 1, "sequence_parallel": True}
    config = torchacc.Config(backend="xla", dist={"fsdp": {**fsdp, "wrap_layer_cls": "Block"}, "tp": tp})
    with pytest.raises(torchacc.ConfigError, match=r"sequence_parallel.*shard_output_callable: leave one of them out"):
        torchacc.accelerate(make_model(), config=config)
