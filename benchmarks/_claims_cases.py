"""What `fsdp_claims.py` compares, and what is said of it elsewhere. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from _memory_cases import LONG, Workload

WIDE = Workload(layers=4, width=512, heads=8, vocabulary=2048, length=64, batch=8)
"""Much to gather for little to compute."""
GPU_COMMAND = "python -m benchmarks --profile gpu"


@dataclass(frozen=True)
class Case:
    """One way to train a model natively."""

    name: str
    size: Workload
    processes: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    """That of torchacc, as a file would have it."""


def _sharded(name: str, **options: Any) -> Case:
    fsdp = {"size": 2, **options}
    return Case(name, WIDE, processes=2, config={"backend": "native", "dist": {"fsdp": fsdp}})


CASES = (
    _sharded("no prefetch", backward_prefetch="NONE"),
    _sharded("backward prefetch", backward_prefetch="BACKWARD_PRE"),
    _sharded("forward and backward prefetch", backward_prefetch="BACKWARD_PRE", forward_prefetch=True),
    Case("activations kept", LONG, config={"backend": "native"}),
    Case("activations recomputed", LONG, config={"backend": "native", "memory": {"gc": True}}),
    Case(
        "all but products recomputed",
        LONG,
        config={"backend": "native", "memory": {"gc": True, "gc_policy": "save_matmuls"}},
    ),
    Case("every second block recomputed", LONG, config={"backend": "native", "memory": {"gc": True, "gc_every": 2}}),
)
QUICK = ("activations kept", "activations recomputed")


@dataclass(frozen=True)
class Pair:
    """An option, and the case without it."""

    name: str
    case: str
    reference: str


PAIRS = (
    Pair("Backward prefetch", "backward prefetch", "no prefetch"),
    Pair("Forward and backward prefetch", "forward and backward prefetch", "no prefetch"),
    Pair("Recompute", "activations recomputed", "activations kept"),
    Pair("Recompute of all but products", "all but products recomputed", "activations kept"),
    Pair("Recompute of every second block", "every second block recomputed", "activations kept"),
)

CLAIMS = (
    (
        "FULL_SHARD trains more parameters than data parallelism",
        "3.33 times",
        "searched for in XLA's plans: `python benchmarks/memory.py --parts search`",
    ),
    ("BACKWARD_PRE gathers the next unit early", "13 % faster, 0.59 % more memory", "Backward prefetch"),
    ("activations are recomputed", "33 to 38 % less memory, 20 to 25 % more time", "Recompute"),
    ("shards are kept in the host's memory", "less device memory, more time", None),
    ("activations are kept in the host's memory", "less device memory, more time", None),
)
"""What it is about, what is said, and the pair that shows it, or where it is measured; None for a GPU's profile."""
