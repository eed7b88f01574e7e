"""The two sides of a random script: a model that torchacc has sharded, and the same one in plain PyTorch.

A rule of `script_rules.py` is one function that is called with either side. What differs between a script with torchacc
and one without, as the migration guides have it, is a method here.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils import clip_grad
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import torchacc
from torchacc.engines import registry
from torchacc.engines.sharded_model import sharded_model
from torchacc.env import read_job

VOCABULARY, WIDTH, LENGTH = 12, 8, 4
_generator = torch.Generator().manual_seed(7)
BATCHES = torch.randint(0, VOCABULARY, (4, 4, LENGTH), generator=_generator)
"""Four global batches, of two rows for each device."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "full-shard": {"dist": {"fsdp": {"size": 2}}},
    "grad-op": {"dist": {"fsdp": {"size": 2, "sharding_strategy": "SHARD_GRAD_OP"}}},
    "no-shard": {"dist": {"fsdp": {"sharding_strategy": "NO_SHARD"}}},
    "default": {},
    "hybrid": {"dist": {"dp": {"size": 2}, "fsdp": {"size": 2, "sharding_strategy": "HYBRID_SHARD"}}},
    "replicated": {"dist": {"dp": {"size": 2}, "fsdp": {"size": 2, "sharding_strategy": "SHARD_GRAD_OP"}}},
    "compiled": {"compute": {"compile": True, "compile_backend": "aot_eager"}},
}
PIPELINE = {"size": 2, "num_microbatches": 2}
OVER_AXES: dict[str, dict[str, Any]] = {
    "tp": {"tp": {"size": 2}},
    "sp": {"sp": {"size": 2}},
    "sp-ring": {"sp": {"size": 2, "ring_size": 2}},
    "ep": {"ep": {"size": 2}},
    "pp": {"pp": PIPELINE},
    "pp-1f1b": {"pp": PIPELINE | {"schedule": "1f1b"}},
    "pp-fsdp": {"pp": PIPELINE, "fsdp": {"size": 2}},
    "pp-zero-bubble-fsdp": {"pp": PIPELINE | {"schedule": "zero_bubble"}, "fsdp": {"size": 2}},
    "pp-tp": {"pp": PIPELINE, "tp": {"size": 2}},
    "pp-sp": {"pp": PIPELINE, "sp": {"size": 2}},
    "sp-tp": {"sp": {"size": 2}, "tp": {"size": 2}},
    "tp-fsdp": {"tp": {"size": 2}, "fsdp": {"size": 2}},
    "sp-fsdp": {"sp": {"size": 2}, "fsdp": {"size": 2}},
    "ep-fsdp": {"ep": {"size": 2}, "fsdp": {"size": 2}},
    "dp-tp": {"dp": {"size": 2}, "tp": {"size": 2}},
    "dp-pp": {"dp": {"size": 2}, "pp": PIPELINE},
}
"""Layouts of a language model of transformers, over the axes that the native engine splits it by."""
LAYOUTS |= {name: {"dist": axes} for name, axes in OVER_AXES.items()}


class Block(nn.Module):
    """A unit: a norm, a product, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.product = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.product(self.norm(x)) + self.offset)


class Small(nn.Module):
    """Two units, and what a root has: an embedding tied to the head, a scalar, few rows, a frozen one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.rows = nn.Parameter(torch.randn(3, WIDTH))
        self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("factor", torch.rand(WIDTH))
        self.register_buffer("term", torch.rand(WIDTH), persistent=False)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(tokens) * self.factor + self.term + self.fixed + self.rows.sum(0)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x) * self.scale
        return {"loss": next_token_loss(logits, tokens), "logits": logits}


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def over_axes(num_devices: int) -> list[str]:
    """Return the names of the layouts over axes that take so many devices."""
    sizes = {name: math.prod(axis["size"] for axis in axes.values()) for name, axes in OVER_AXES.items()}
    return [name for name, size in sizes.items() if size == num_devices]


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
    "initializer_range": 0.4, "attn_implementation": "sdpa",
}  # fmt: skip
"""With weights of a size that does not multiply rounding: a norm divides by that of its input."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH, "head_dim": WIDTH // 2}


def make_model(layout: str) -> nn.Module:
    torch.manual_seed(1)
    if layout not in OVER_AXES:
        return Small()
    if "ep" in OVER_AXES[layout]:
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **EXPERTS))
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))


class Side:
    """A plain model, and what a script keeps beside it."""

    engine: ClassVar[str] = "plain"

    def __init__(self, model: nn.Module, layout: str) -> None:
        self.model = model
        self.axes = OVER_AXES.get(layout)
        """Over which a language model is, or would be on the other side; None for `Small`."""
        self.rate = 1.0 if self.axes is None else 0.1
        """Of how fast optimizers go: a language model's steps would multiply rounding."""
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        """One for each optimizer, or None."""
        self.pending: list[torch.Tensor] = []
        """Losses that have had no backward yet."""
        self.averages: dict[str, Any] = {}
        """Moving averages of weights, by how they are kept."""
        self.saved: dict[int, Any] = {}
        """Checkpoints by slot."""
        self.structures: dict[int, Any] = {}
        """What was saved of optimizer and scheduler, by slot."""
        self.window_is_open = False
        """Whether a backward inside of `accumulate()` was the last one."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def named(self, which: int) -> list[nn.Parameter]:
        """Return a group of parameters that scripts freeze or edit."""
        model: Any = self.model
        if self.axes is None:
            groups = [
                lambda: list(model.layers[0].parameters()),
                lambda: [model.embedding.weight],
                lambda: [model.scale, model.rows],
                lambda: [model.layers[1].product.weight, model.fixed],
                lambda: list(model.layers.parameters()),
            ]
        else:
            inner = model.model
            groups = [
                lambda: list(inner.layers[0].parameters()),
                lambda: [inner.embed_tokens.weight],
                lambda: [inner.norm.weight],
                lambda: [inner.layers[1].self_attn.q_proj.weight, inner.layers[0].input_layernorm.weight],
                lambda: list(inner.layers.parameters()),
            ]
        return groups[which % len(groups)]()

    def has_logits(self, *, beside_loss: bool) -> bool:
        """Return whether a forward gives logits, which of some layouts it does where no gradients are recorded."""
        splits = self.axes or {}
        return not torch.is_grad_enabled() or not ("pp" in splits or (beside_loss and "sp" in splits))

    def loss(self, tokens: torch.Tensor) -> Any:
        """Return what the model gives for inputs with labels."""
        return self.model(tokens) if self.axes is None else self.model(tokens, labels=tokens, use_cache=False)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of inputs without labels."""
        output = self.model(tokens=tokens) if self.axes is None else self.model(tokens, use_cache=False)
        return output["logits"]  # type: ignore[no-any-return]

    def batch(self, index: int) -> torch.Tensor:
        return BATCHES[index % len(BATCHES)]

    def clip_of_the_model(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return self.clip_of_torch(max_norm, norm_type)

    def clip_of_torch(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return clip_grad.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over devices of what the script computes from its own rows."""
        return value.detach()

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rows of all devices."""
        return value.detach()

    def full_state(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.model.state_dict())

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return copy.deepcopy(optimizer.state_dict())

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()}

    def save(self, slot: int, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        self.saved[slot] = copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": None if optimizer is None else optimizer.state_dict(),
                "scheduler": None if scheduler is None else scheduler.state_dict(),
            }
        )

    def load(self, slot: int, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        saved = copy.deepcopy(self.saved[slot])
        self.model.load_state_dict(saved["model"])
        if optimizer is not None:
            optimizer.load_state_dict(saved["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(saved["scheduler"])

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what plain PyTorch does not after a step."""

    def sync(self) -> None:
        """Run what is recorded."""


class PlainSide(Side):
    """Trains on the whole batch, on the CPU."""

    def __init__(self, layout: str, beside: str) -> None:
        super().__init__(make_model(layout), layout)
        self.beside = beside

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Documented in docs/troubleshooting.md ("no optimizer.zero_grad() came after …"): under XLA a step frees the
        # gradients that it has used.
        if self.beside.startswith("xla"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None


class ShardedSide(Side):
    """What `accelerate()` has made of the model, on this rank."""

    def __init__(self, layout: str, engine: str, folder: Path) -> None:
        options = copy.deepcopy(LAYOUTS[layout])
        if read_job().num_processes == 1 and engine != "xla-spmd":
            options.get("dist", {}).get("fsdp", {}).pop("size", None)
        if engine == "xla-spmd":
            options.setdefault("dist", {}).setdefault("fsdp", {})["use_spmd"] = True
            if layout == "default":
                options["dist"]["dp"] = {"size": 2}
        config = torchacc.Config.from_dict({"backend": engine.partition("-")[0], **options})
        super().__init__(torchacc.accelerate(make_model(layout), None, config), layout)
        self.sharded = sharded_model(self.model)
        self.engine = self.sharded.engine.name  # type: ignore[misc]
        self.job = self.sharded.engine.job
        self.folder = folder

    @property
    def device(self) -> torch.device:
        return self.sharded.engine.device

    @property
    def is_one_process(self) -> bool:
        return self.job.num_processes == 1

    def by_rank(self, payload: Any) -> list[Any]:
        return [payload] if self.is_one_process else self.sharded.engine.group.all_gather_objects(payload)

    def batch(self, index: int) -> torch.Tensor:
        whole = super().batch(index)
        if not self.is_one_process:
            mesh = self.sharded.engine.mesh
            whole = whole.chunk(mesh.data_parallel_size)[mesh.data_parallel_rank(self.job.rank)]
        return self.sharded.engine.to_device(whole)

    def clip_of_the_model(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return self.model.clip_grad_norm_(max_norm, norm_type)  # type: ignore[operator, no-any-return]

    def clip_of_torch(self, max_norm: float, norm_type: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)  # which torch_xla replaces

    def accumulate(self) -> AbstractContextManager[None]:
        return torchacc.accumulate(self.model)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.by_rank(value.detach().cpu())).mean(0)

    def rows(self, value: torch.Tensor) -> torch.Tensor:
        parts = self.by_rank(value.detach().cpu())
        mesh = self.sharded.engine.mesh
        of_shards = {mesh.data_parallel_rank(rank): part for rank, part in enumerate(parts)}
        return torch.cat([of_shards[shard] for shard in sorted(of_shards)])

    def full_state(self) -> dict[str, torch.Tensor]:
        return torchacc.full_state_dict(self.model)

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return torchacc.optim_state_dict(self.model, optimizer)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        has_none = [parameter.grad is None for parameter in self.model.parameters()]
        ranks = self.by_rank(has_none)
        assert all(other == ranks[0] for other in ranks), "only some ranks have a gradient"
        return {name: self._whole_gradient(name, p) for name, p in self.model.named_parameters()}

    def _whole_gradient(self, name: str, parameter: nn.Parameter) -> torch.Tensor | None:
        if parameter.grad is None:
            return None
        holding = self.sharded.shards.get(parameter)
        assert holding is not None, f"model.parameters() hands out another {name} than the one that is trained"
        (local,) = self.sharded.shards.fetch([parameter.grad])
        shape = holding.members[0][1]
        whole = self.sharded.shards.gather(holding, local, rank0_only=False)
        return whole.view(shape)

    def save(self, slot: int, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        torchacc.checkpoint.save(self.folder / f"{slot}", model=self.model, optimizer=optimizer, scheduler=scheduler)
        self.saved[slot] = True

    def load(self, slot: int, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        drawn = torch.get_rng_state()  # which a checkpoint brings back as well
        torchacc.checkpoint.load(self.folder / f"{slot}", model=self.model, optimizer=optimizer, scheduler=scheduler)
        torch.set_rng_state(drawn)

    def sync(self) -> None:
        torchacc.sync()


@contextmanager
def random_numbers_untouched() -> Iterator[None]:
    """Fail where what runs inside draws from PyTorch's generator: a script's own numbers would be others."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "draws random numbers of the script's generator"


def active_engine() -> Any:
    return registry.active_engine()
