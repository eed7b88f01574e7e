"""`auto` means one engine for one config, whoever asks: accelerate(), fsdp() and the trainer."""

import pytest
import torch
from torch import nn

import torchacc
from torchacc import functional
from torchacc.config import Config
from torchacc.engines import registry
from torchacc.engines.xla import hardware, runtime
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.train.config import DistributedConfig
from torchacc.train.device_layout import make_layout

XLA_HAS_IT = [
    {},
    {"compute": {"bf16": True}},
    {"memory": {"gc": True}},
    {"dist": {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}},
    {"backend": "xla"},
]
XLA_HAS_IT_NOT = [
    {"compute": {"fp16": True}},
    {"compute": {"compile": True}},
    {"memory": {"gc": True, "gc_policy": "save_matmuls"}},
    {"memory": {"offload_activations": True}},
    {"memory": {"step_in_backward": True}},
    {"dist": {"fsdp": {"cpu_offload": True}}},
    {"backend": "native"},
]
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
"""fsdp()'s names -> the trainer's."""


@pytest.fixture(params=[False, True], ids=["without torch_xla", "with torch_xla"])
def has_xla(request, monkeypatch):
    """A machine without accelerators, with torch_xla or without it."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(runtime, "is_installed", lambda: request.param)
    monkeypatch.setattr(runtime, "check_versions", lambda: None)
    monkeypatch.setattr(hardware, "check_platform", lambda: None)
    monkeypatch.setattr(hardware, "platform", lambda: "CPU")
    return request.param


def by_accelerate(options):
    return registry.make_engine(Config.from_dict(options), Job()).name


def by_trainer(options, precision=None):
    options = {section: dict(values) if isinstance(values, dict) else values for section, values in options.items()}
    fsdp = options.pop("dist", {}).get("fsdp", {})
    distributed = {"devices": 1, "engine": options.pop("backend", "auto"), "fsdp": fsdp}
    section = DistributedConfig.model_validate(distributed)
    return make_layout(section, options, precision=precision, launched=None).engine


@pytest.mark.parametrize("options", [*XLA_HAS_IT, *XLA_HAS_IT_NOT], ids=str)
def test_accelerate_and_the_trainer_choose_alike(has_xla, options):
    may_be_xla = options in XLA_HAS_IT and (has_xla or "backend" in options)
    expected = "xla-spmd" if may_be_xla else "native"
    assert (by_accelerate(options), by_trainer(options)) == (expected, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fsdp_chooses_like_accelerate_and_the_trainer(has_xla, monkeypatch, precision):
    chosen = []

    def accelerate(model, config):
        chosen.append(registry.make_engine(config, Job()).name)
        return model

    monkeypatch.setattr(functional, "accelerate", accelerate)
    torchacc.fsdp(nn.Linear(2, 2), mp=precision)
    asked = {} if precision == "fp32" else {"compute": {precision: True}}
    assert chosen == [by_accelerate(asked)] == [by_trainer({}, PRECISIONS[precision])]
    assert chosen[0] == ("xla-spmd" if has_xla and precision != "fp16" else "native")


def test_auto_leaves_no_tpu_idle_for_what_xla_has_not(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(runtime, "is_installed", lambda: True)
    monkeypatch.setattr(runtime, "check_versions", lambda: None)
    monkeypatch.setattr(hardware, "check_platform", lambda: None)
    monkeypatch.setattr(hardware, "platform", lambda: "TPU")
    assert registry.choose(Config(compute={"fp16": True}), Job()).engine == "xla-spmd"  # which refuses it


@pytest.mark.parametrize("axis", ["sp", "ep"])
def test_auto_takes_xla_for_axes_that_one_program_alone_has_where_it_is_to_be_one(has_xla, axis):
    config = Config.from_dict({"dist": {axis: {"size": 2}}})
    expected = registry.Choice("native", fallback_reason=f"dist.{axis}.size" if has_xla else None)
    assert registry.choose(config, Job()) == expected
    config.dist.fsdp.use_spmd = True
    assert registry.choose(config, Job()).engine == ("xla-spmd" if has_xla else "native")


def test_why_auto_is_native_is_said_where_torch_xla_would_have_been_taken(has_xla, caplog):
    with caplog.at_level("INFO", logger="torchacc"):
        registry.make_engine(Config(compute={"fp16": True}), Job())
    assert ("takes the native engine for compute.fp16" in caplog.text) == has_xla


@pytest.mark.parametrize("of_xla", [{"compute": {"scan_layers": True}}, {"dist": {"fsdp": {"use_spmd": True}}}])
def test_auto_refuses_options_of_two_engines(monkeypatch, of_xla):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(runtime, "is_installed", lambda: True)
    monkeypatch.setattr(runtime, "runs_on_cpu", lambda: True)
    config = Config.from_dict(of_xla)
    config.compute.fp16 = True
    with pytest.raises(ConfigError, match=r"compute\.fp16 is what the native engine alone can do, and"):
        registry.choose(config, Job())
    config.backend = "native"
    assert registry.choose(config, Job()).engine == "native"
