"""The table in docs/engines.md says what the engines refuse and what means nothing to them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from torchacc.config import Config, resolve
from torchacc.engines import registry
from torchacc.engines.xla import runtime
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import from_config
from torchacc.parallel.plan import make_plan

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
FLOAT8 = {
    "compute.bf16": True,
    "compute.fp8": True,
    "compute.fp8_min_features": 16,
    "compute.fp8_emulate": True,
}
# What asks for each option of the table; others that it needs are set beside it.
ASKED = {
    "compute.bf16": {"compute.bf16": True},
    "compute.master_dtype": {"compute.bf16": True, "compute.master_dtype": "bfloat16"},
    "compute.fp16": {"compute.fp16": True},
    "compute.fp8": {**FLOAT8, "compute.fp8": True},
    "compute.fp8_recipe": {**FLOAT8, "compute.fp8_recipe": "rowwise"},
    "compute.fp8_layers": {**FLOAT8, "compute.fp8_layers": ["layers.0"]},
    "compute.fp8_skip": {**FLOAT8, "compute.fp8_skip": ["layers.0"]},
    "compute.fp8_min_features": {**FLOAT8, "compute.fp8_min_features": 16},
    "compute.fp8_emulate": FLOAT8,
    'compute.reduce_dtype = "bfloat16"': {"compute.reduce_dtype": "bfloat16"},
    "memory.gc": {"memory.gc": True},
    "memory.gc_policy": {"memory.gc": True, "memory.gc_policy": "save_matmuls"},
    "memory.step_in_backward": {"memory.step_in_backward": True},
    "dist.fsdp.cpu_offload": {"dist.fsdp.cpu_offload": True},
    "memory.offload_activations": {"memory.offload_activations": True},
    "dist.tp.plan": {"dist.tp.size": 2, "dist.fsdp.size": 1, "dist.tp.plan": {"0.weight$": ["tp", None]}},
    "dist.tp.sequence_parallel": {
        **{"dist.tp.size": 2, "dist.fsdp.size": 1, "dist.tp.plan": {"0.weight$": ["tp", None]}},
        "dist.tp.sequence_parallel": True,
    },
    "compute.chunked_loss": {"compute.chunked_loss": True},
    "compute.scan_layers": {"compute.scan_layers": True},
    "compute.compile": {"compute.compile": True, "compute.compile_backend": "eager"},
    "compute.compile_mode": {"compute.compile": True, "compute.compile_mode": "max-autotune-no-cudagraphs"},
    "compute.compile_dynamic": {"compute.compile": True, "compute.compile_dynamic": True},
    "compute.compile_backend": {"compute.compile": True, "compute.compile_backend": "eager"},
    "compute.compile_cache": {"compute.compile": True, "compute.compile_cache": "cache"},
    "dataloader.buckets": {"dataloader.buckets": [8]},
    "dist.fsdp.backward_prefetch": {"dist.fsdp.backward_prefetch": "NONE"},
    "forward_prefetch": {"dist.fsdp.forward_prefetch": True},
    "dist.fsdp.limit_all_gathers": {"dist.fsdp.limit_all_gathers": False},
    "dist.fsdp.flatten_parameters": {"dist.fsdp.flatten_parameters": True},
    "dist.fsdp.use_orig_params": {"dist.fsdp.use_orig_params": False},
    "dist.fsdp.sync_module_states": {"dist.fsdp.sync_module_states": True},
    "dist.fsdp.shard_output_callable": {"dist.fsdp.shard_output_callable": print},
    "memory.gpu_fraction": {"memory.gpu_fraction": 0.5},
    "memory.gpu_preallocate": {"memory.gpu_preallocate": False},
    "dist.pp.size": {"dist.pp.size": 2, "dist.fsdp.size": 1},
    "dist.sp.size": {"dist.sp.size": 2, "dist.fsdp.size": 1},
    "dist.ep.size": {"dist.ep.size": 2, "dist.fsdp.size": 1},
    "compute.acc_scaled_dot_attn": {"compute.acc_scaled_dot_attn": True},
    'compute.attention = "sdpa"': {"compute.attention": "sdpa"},
    "compute.attention": {"compute.attention": "sdpa_math"},
}


def read_table() -> dict[tuple[str, str], str]:
    """Return what the page says, by option and engine."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| | `xla-spmd` | `xla-multiprocess` | `native` |")
    kinds = [cell.strip(" `") for cell in lines[start].split("|")[2:-1]]
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        options, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        for option in options.split("`")[1::2]:
            found |= {(option, kind): cell for kind, cell in zip(kinds, cells, strict=True)}
    return found


TABLE = read_table()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def outcome(kind: str, option: str) -> str:
    """Return what an engine makes of an option on this machine's CPU."""
    config = Config()
    config.dist.fsdp.size = 2
    config.dist.fsdp.use_spmd = kind == "xla-spmd"
    for path, value in ASKED[option].items():
        *sections, name = path.split(".")
        section = config
        for part in sections:
            section = getattr(section, part)
        setattr(section, name, value)
    job = Job() if kind == "xla-spmd" else Job(num_processes=2, local_num_processes=2)
    try:
        resolved = resolve(config, job, num_devices=2)
        engine = registry.engine_class(kind)(config=resolved, mesh=from_config(resolved), job=job)
        make_plan(Layers(), resolved, engine.mesh)
        engine.check(Layers())
    except ConfigError:
        return "refused"
    return "no effect" if path in engine.options_without_effect() else "yes"


def test_every_option_of_the_table_is_looked_at():
    elsewhere = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "BACKWARD_POST", "torchacc.GradScaler"}
    options = {option for option, _ in TABLE} - elsewhere
    assert options == ASKED.keys() | {"dist.tp.size"}


@pytest.mark.skipif(
    torch.accelerator.is_available() or not runtime.runs_on_cpu(), reason="the outcomes are those on a CPU"
)
@pytest.mark.parametrize("kind", registry.ENGINES)
@pytest.mark.parametrize("option", ASKED)
def test_the_engine_does_what_the_table_says(option, kind):
    if "fp8" in option and kind == "native":
        pytest.importorskip("torchao")
    said = TABLE[option, kind]
    if "on a CPU" in said:
        said = next(part for part in said.split("; ") if "on a CPU" in part).removesuffix(" on a CPU")
    elif said == "on NVIDIA GPUs":
        said = "no effect"
    assert said.startswith(outcome(kind, option)), f"docs/engines.md: {option} in {kind}: {said}"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the outcomes are those on a CPU")
def test_float8_is_refused_with_the_axis_that_the_table_names():
    pytest.importorskip("torchao")
    config = Config.from_dict({"backend": "native", "dist": {"fsdp": {"size": 1}, "tp": {"size": 2}}})
    for path, value in FLOAT8.items():
        setattr(config.compute, path.removeprefix("compute."), value)
    job = Job(num_processes=2, local_num_processes=2)
    resolved = resolve(config, job, num_devices=2)
    engine = registry.engine_class("native")(config=resolved, mesh=from_config(resolved), job=job)
    with pytest.raises(ConfigError, match="compute.fp8 = True"):
        engine.check(Layers())
    assert "but with `dist.tp.size`" in TABLE["compute.fp8", "native"]
