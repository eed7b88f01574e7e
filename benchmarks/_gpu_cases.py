"""What `gpu.py` compares: some models, and the ways to train them. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from _memory_cases import Workload

GPT2_124M = Workload(layers=12, width=768, heads=12, vocabulary=50257, length=1024, batch=8)
LLAMA_1B = Workload(layers=16, width=2048, heads=32, vocabulary=32000, length=2048, batch=4, family="llama")
LLAMA_LONG = replace(LLAMA_1B, length=32768, batch=1)
MIXTRAL_1B = Workload(layers=10, width=1024, heads=16, vocabulary=32000, length=2048, batch=4, family="mixtral")
LARGEST = "largest Llama"
DEEPEST = Workload(layers=96, width=4096, heads=32, vocabulary=32000, length=2048, batch=2, family="llama")
MODELS = {
    "GPT-2 124M": GPT2_124M,
    "Llama 1.2B": LLAMA_1B,
    "Llama 1.2B, long": LLAMA_LONG,
    "Mixtral 1.1B": MIXTRAL_1B,
    LARGEST: DEEPEST,
}
"""`batch` is that of one device. The last one has as many layers as a device has memory for, and no more than these."""
FILLED = 0.85
"""How much of a device's memory the plan of that may take: the rest is for the allocator's pieces and the libraries."""
TINY_MEMORY = 3_500_000
"""Bytes that stand for a device's memory where the models are tiny."""


def tiny(size: Workload) -> Workload:
    """Return a model of the same family, to see that all works."""
    return replace(size, layers=2, width=64, heads=2, vocabulary=512, length=32, batch=2)


@dataclass(frozen=True)
class Case:
    """One way to train a model."""

    name: str
    kind: str
    """`native` or `xla` of torchacc; `fsdp2`, or `torchtitan`'s order of doing more, by hand."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options of `torchacc.Config`, dotted."""
    compiled: bool = False
    """Whether each block is compiled by torch.compile."""
    recomputed: bool = False
    """Whether each block's activations are recomputed in backward."""
    fp8: bool = False
    """Whether its linear layers multiply in float8, tensorwise."""

    @property
    def is_planned(self) -> bool:
        """Whether the memory plan knows the case: torchacc natively, not compiled, and nothing on the host."""
        on_host = ("memory.offload_activations", "dist.fsdp.cpu_offload")
        is_known = self.kind == "native" and not self.compiled and not self.fp8
        return is_known and not any(option in self.config for option in on_host)

    def suits(self, label: str) -> bool:
        """Return whether a model is trained so: GPT-2 has no `nn.Linear`, and the largest model is one recomputed."""
        return (self.recomputed or label != LARGEST) and not (self.fp8 and MODELS[label].family == "gpt2")


CASES = (
    Case("FSDP2 by hand", "fsdp2"),
    Case("FULL_SHARD", "native"),
    Case("FSDP2 by hand, torch.compile", "fsdp2", compiled=True),
    Case("FULL_SHARD, torch.compile", "native", compiled=True),
    Case("NO_SHARD", "native", {"dist.fsdp.sharding_strategy": "NO_SHARD"}),
    Case("FULL_SHARD, no prefetch", "native", {"dist.fsdp.backward_prefetch": "NONE"}),
    Case("FULL_SHARD, forward prefetch too", "native", {"dist.fsdp.forward_prefetch": True}),
    Case("FULL_SHARD, loss in chunks", "native", {"compute.chunked_loss": True}),
    Case("FULL_SHARD, torch.compile, fp8", "native", compiled=True, fp8=True),
    Case("FULL_SHARD, recompute", "native", recomputed=True),
    Case("torchtitan's recipe by hand", "torchtitan", compiled=True, recomputed=True),
    Case("FULL_SHARD, recompute, torch.compile", "native", compiled=True, recomputed=True),
    Case("torchtitan's recipe by hand, fp8", "torchtitan", compiled=True, recomputed=True, fp8=True),
    Case("FULL_SHARD, recompute, torch.compile, fp8", "native", compiled=True, recomputed=True, fp8=True),
    Case("FULL_SHARD, activations on the host", "native", {"memory.offload_activations": True}),
    Case("FULL_SHARD, shards on the host", "native", {"dist.fsdp.cpu_offload": True}),
    Case("XLA", "xla", {"dist.fsdp.use_spmd": True}),
    Case("XLA, loss in chunks", "xla", {"dist.fsdp.use_spmd": True, "compute.chunked_loss": True}),
)
QUICK = ("FSDP2 by hand", "FULL_SHARD")
BASE = "FULL_SHARD"
RECOMPUTED = "FULL_SHARD, recompute"
"""What the options are compared with: the second one where there is no memory for the first."""
RIVALS = (
    ("FULL_SHARD", "FSDP2 by hand"),
    ("FULL_SHARD", "FSDP2 by hand, torch.compile"),
    ("FULL_SHARD, torch.compile", "FSDP2 by hand, torch.compile"),
    ("FULL_SHARD, recompute, torch.compile", "torchtitan's recipe by hand"),
    ("FULL_SHARD, recompute, torch.compile, fp8", "torchtitan's recipe by hand, fp8"),
    ("XLA", "FSDP2 by hand, torch.compile"),
)
REASONS = {
    ("FULL_SHARD", "FSDP2 by hand, torch.compile"): "torchacc's native engine compiles nothing without compute.compile"
}
"""Why torchacc takes longer or more, as far as known."""
LOSS_TOLERANCE = 1e-2
"""Largest relative difference between losses in bfloat16."""
FP8_LOSS_TOLERANCE = 5e-2
"""The same in float8: by hand, too, it was 4% after 22 steps, while losses still went up and down."""
