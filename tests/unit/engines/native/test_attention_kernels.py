"""`compute.attention` computes what the unsharded model does, and is refused where it cannot."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import forkrun
from torchacc.cli import env_command
from torchacc.config import Config, resolve
from torchacc.engines import attention_kernels, registry
from torchacc.engines.xla.recording import RecordingEngine
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import from_config
from torchacc.train.checks import check_kernel
from torchacc.train.config import TextConfig

PROGRAM = Path(__file__).with_name("attention_program.py")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_ONE = [
    "flex_has_the_numbers_of_a_sliding_window",
    "flex_has_the_numbers_of_a_bias_that_all_samples_share",
    "eager_has_the_numbers",
    "pytorchs_kernels_have_the_numbers",
    "recompute_has_the_numbers",
    "a_loss_in_chunks_has_the_numbers",
    "compiled_units_have_the_numbers",
    "bfloat16_is_near",
    "one_backend_runs_in_forward_and_in_backward",
    "a_backend_is_given_back_after_a_forward",
    "models_inside_of_others_are_chosen_for",
    "plain_modules_run_by_one_backend",
    "a_backend_that_takes_no_dropout_says_what_to_write",
    "documents_in_a_row_are_refused_for_flash_attention",
    "masks_of_a_script_are_applied_or_refused",
]
ON_TWO = [
    "flex_has_the_numbers_of_a_soft_cap",
    "pytorchs_kernels_have_the_numbers",
    "layers_split_over_devices_have_the_numbers",
]
needs_transformers = pytest.mark.skipif(
    attention_kernels.transformers_attention.is_for_installed("transformers_attention") is False,
    reason="transformers, of a version that is known, is not installed",
)


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "cases"), [(1, ON_ONE), (2, ON_TWO)], ids=["one", "two"])
def test_numbers_are_those_of_the_unsharded_model(num_ranks, cases, tmp_path):
    done = forkrun.run(PROGRAM, tmp_path, *cases, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(num_ranks):
        folder = tmp_path / str(rank) if num_ranks > 1 else tmp_path
        found = json.loads((folder / "found.json").read_text())
        assert found.keys() == set(cases)
        failed = {case: why for case, why in found.items() if why is not None}
        assert not failed, "\n".join(f"rank {rank}, {case}: {why}" for case, why in failed.items())


def resolved(**compute):
    return resolve(Config.from_dict({"compute": compute}), Job(), num_devices=1)


def check_device(device=CPU, **compute):
    attention_kernels.check_device(resolved(**compute), device)


def test_the_older_name_is_that_of_sdpa():
    assert resolved(acc_scaled_dot_attn=True).compute.attention == "sdpa"
    assert resolved(acc_scaled_dot_attn=True, attention="sdpa").compute.attention == "sdpa"
    with pytest.raises(ConfigError, match=r"acc_scaled_dot_attn = True with compute\.attention = 'flex_attention'"):
        resolved(acc_scaled_dot_attn=True, attention="flex_attention")


def test_a_name_that_is_none_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"compute\.attention = 'flex': expected 'auto', .*'flex_attention'"):
        Config().compute.attention = "flex"


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        ("sdpa_efficient", "it is for NVIDIA GPUs, and the device is cpu"),
        ("sdpa_cudnn", "it is for NVIDIA GPUs, and the device is cpu"),
        ("flash_attention_3", "it is for NVIDIA GPUs, and the device is cpu"),
    ],
)
def test_a_kernel_of_gpus_is_refused_on_a_cpu(attention, why):
    with pytest.raises(ConfigError, match=rf"'{attention}' cannot be had on this machine: {why}.*'sdpa' can every"):
        check_device(attention=attention)


def test_another_accelerator_has_no_flex_attention():
    with pytest.raises(ConfigError, match="PyTorch has no flex attention for mps"):
        check_device(torch.device("mps"), attention="flex_attention")


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(ConfigError, match=r"this GPU has the compute capability 7\.5, and it needs 8\.0"):
        check_device(GPU, attention="sdpa_flash", bf16=True)
    check_device(GPU, attention="sdpa_efficient")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(attention_kernels, "installed_version", lambda package: None)
    with pytest.raises(ConfigError, match=r"flash-attn-4 is not installed: pip install flash-attn-4"):
        check_device(GPU, attention="flash_attention_4", bf16=True)


def test_a_kernel_of_half_precision_is_refused_in_float32(monkeypatch):
    monkeypatch.setattr(attention_kernels, "installed_version", lambda package: "1.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(
        ConfigError, match=r"'flash_attention_2' computes in bfloat16 or float16: set config\.compute\."
    ):
        check_device(GPU, attention="flash_attention_2")
    check_device(GPU, attention="flash_attention_2", bf16=True)
    check_device(CPU, attention="sdpa_flash")


def test_flex_attention_is_not_compiled_on_a_cpu():
    with pytest.raises(ConfigError, match=r"'flex_attention' with compute\.compile = True cannot be had on a CPU"):
        check_device(attention="flex_attention", compile=True)
    check_device(attention="flex_attention", compile=True, compile_backend="aot_eager")


def test_flex_attention_is_not_among_results_that_are_kept():
    config = Config.from_dict(
        {"compute": {"attention": "flex_attention"}, "memory": {"gc": True, "gc_policy": "save_matmuls"}}
    )
    with pytest.raises(ConfigError, match=r"'flex_attention' with memory\.gc_policy = 'save_matmuls' is not available"):
        attention_kernels.check_device(resolve(config, Job(), num_devices=1), CPU)


def test_a_plain_module_has_no_attention_to_exchange():
    model = nn.Sequential(nn.Linear(2, 2))
    for attention in ("eager", "flex_attention", "flash_attention_2"):
        with pytest.raises(ConfigError, match=rf"'{attention}': Sequential is not a model of transformers"):
            attention_kernels.check_model(resolved(attention=attention), model)
    for attention in ("auto", "sdpa", "sdpa_math"):
        attention_kernels.check_model(resolved(attention=attention), model)


@needs_transformers
@pytest.mark.parametrize(
    ("family", "options", "attention", "why"),
    [
        ("Gemma2", {}, "sdpa", "Gemma2ForCausalLM does not support .*scaled_dot_product_attention yet"),
        ("GPT2", {}, "flex_attention", "GPT2LMHeadModel does not support .* through torch's flex_attention. Leave"),
        ("Llama", {"attention_dropout": 0.5}, "flex_attention", r"has attention_dropout = 0\.5 in its config"),
    ],
)
def test_what_a_kernel_cannot_compute_is_refused(family, options, attention, why):
    import transformers

    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    with torch.device("meta"):
        config = getattr(transformers, f"{family}Config")(num_hidden_layers=1, **options)
        model = getattr(transformers, kind)(config)
    with pytest.raises(ConfigError, match=why):
        attention_kernels.check_model(resolved(attention=attention), model)


@needs_transformers
def test_a_model_that_does_not_choose_by_the_interface_is_refused(monkeypatch):
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1))
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(ConfigError, match="LlamaForCausalLM does not call transformers' AttentionInterface"):
        attention_kernels.check_model(resolved(attention="flex_attention"), model)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("compute", "message"),
    [
        ({"attention": "flex_attention"}, r"compute\.attention = 'flex_attention' is not available under XLA"),
        ({"attention": "sdpa_flash"}, r"compute\.attention = 'sdpa_flash' is not available under XLA"),
    ],
)
def test_kernels_are_refused_under_xla(compute, message):
    config = resolved(**compute)
    engine = registry.engine_class("xla-spmd")(config=config, mesh=from_config(config), job=Job())
    with pytest.raises(ConfigError, match=message):
        engine.check(nn.Linear(2, 2))


@pytest.mark.xla
@pytest.mark.parametrize(
    ("compute", "on_cpu", "on_tpu"),
    [
        ({}, "auto", "blockwise"),
        ({"attention": "sdpa"}, "sdpa", "sdpa"),
        ({"attention": "flash"}, "flash", "flash"),
        ({"acc_scaled_dot_attn": True}, "flash", "flash"),
    ],
)
def test_xla_computes_attention_by_what_the_device_has(compute, on_cpu, on_tpu):
    config = resolved(**compute)
    for platform, expected in (("CPU", on_cpu), ("TPU", on_tpu)):
        engine = RecordingEngine(platform=platform, config=config, mesh=from_config(config), job=Job())
        assert engine.attention == expected


def test_packed_documents_need_a_kernel_that_keeps_them_apart():
    for attention in ("auto", "eager", "sdpa", "flex_attention"):
        check_kernel(TextConfig(), attention)
    check_kernel(TextConfig(packing="concat"), "flash_attention_2")
    with pytest.raises(ConfigError, match=r"'flash_attention_2' with data\.packing = true: FlashAttention of"):
        check_kernel(TextConfig(), "flash_attention_2")


def test_env_lists_every_kernel(monkeypatch):
    found = attention_kernels.survey(CPU)
    can = {finding.name for finding in found if finding.reason is None}
    assert can == {"eager", "sdpa", "sdpa_flash", "sdpa_math", "flex_attention"}
    assert len(found) == 10
    monkeypatch.setattr(env_command, "survey", list)
    lines = env_command._describe(env_command._find()).splitlines()
    assert "  sdpa              can run" in lines
