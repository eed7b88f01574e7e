"""What `memory.py` compares: models, cases, and what is expected of them. Plain data."""

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Workload:
    """A model and its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    """Tokens of a sample."""
    batch: int
    """Samples of all devices together."""
    family: str = "gpt2"

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, {self.batch} x {self.length} tokens"


SMALL_BATCH = Workload(layers=4, width=512, heads=8, vocabulary=2048, length=64, batch=8)
LARGE_BATCH = replace(SMALL_BATCH, length=256, batch=16)
LONG = Workload(layers=4, width=256, heads=4, vocabulary=1024, length=512, batch=4)


@dataclass(frozen=True)
class Case:
    """One way to train a workload."""

    strategy: str
    """A sharding strategy, or torch_xla's own class: `FSDPv2`, or `FSDPv2, prepared` as torchacc prepares models."""
    devices: int
    dp: int = 1
    """Replicas."""
    recompute: bool = False
    bf16: bool = False
    workload: Workload = field(default=SMALL_BATCH)

    @property
    def name(self) -> str:
        """What tells it from the others of its workload."""
        mesh = f"{self.dp} x {self.devices // self.dp}" if self.dp > 1 else str(self.devices)
        return f"{self.strategy} on {mesh}{', recomputed' if self.recompute else ''}{', bf16' if self.bf16 else ''}"


def with_and_without(case: Case) -> tuple[Case, Case]:
    """Return a case, and the same with recompute."""
    return case, replace(case, recompute=True)


PLANS = tuple(
    case
    for plain in (
        Case("NO_SHARD", 1),
        *(Case(name, n) for n in (2, 4, 8) for name in ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")),
        Case("HYBRID_SHARD", 4, dp=2),
        Case("HYBRID_SHARD", 8, dp=2),
    )
    for case in with_and_without(plain)
)
AGAINST_FSDP_V2 = tuple(
    Case(name, 4, workload=workload)
    for workload in (SMALL_BATCH, LARGE_BATCH)
    for name in ("FULL_SHARD", "FSDPv2", "FSDPv2, prepared")
)
LONG_PLANS = tuple(
    case for name in ("NO_SHARD", "FULL_SHARD") for case in with_and_without(Case(name, 2, workload=LONG))
)
QUICK = (PLANS[0], *AGAINST_FSDP_V2[:2])
"""What shows that the program works."""
GPT2_124M = Workload(layers=12, width=768, heads=12, vocabulary=50257, length=256, batch=1)
LLAMA_162M = replace(GPT2_124M, vocabulary=32000, family="llama")
PLANNED = tuple(
    Case(strategy, n, workload=replace(model, batch=n))
    for model in (GPT2_124M, LLAMA_162M, replace(LLAMA_162M, family="llama with LoRA"))
    for n in (1, 2, 4, 8)
    for strategy in ("FULL_SHARD", "NO_SHARD")
)
"""What `torchacc plan` is compared with XLA on: a sample on each device."""
PLAN_TOLERANCE = 0.1
SEARCH = Case("NO_SHARD", 8, workload=replace(SMALL_BATCH, layers=2))
"""Whose memory there is for the searches, on as many devices as they have."""
SEARCHES = (
    replace(SEARCH, strategy="FULL_SHARD", devices=4),
    replace(SEARCH, strategy="SHARD_GRAD_OP"),
    replace(SEARCH, strategy="FULL_SHARD"),
    replace(SEARCH, strategy="FULL_SHARD", recompute=True),
)
"""What is searched for the deepest model that fits."""


@dataclass(frozen=True)
class Share:
    """How much of a reference's bytes a case may take."""

    case: Case
    reference: Case
    limit: float
    what: str = "total"
    """`total`, `updated` (parameters and optimizer state) or `traffic` (the results of all collectives)."""
    exactly: bool = False
    """Whether it is to be neither more nor less."""


EXPECTATIONS = (
    Share(Case("FULL_SHARD", 4), Case("NO_SHARD", 4), 0.36),
    Share(Case("FULL_SHARD", 8), Case("NO_SHARD", 8), 0.21),
    *(Share(Case("FULL_SHARD", n), Case("NO_SHARD", n), 1 / n, "updated", exactly=True) for n in (2, 4, 8)),
    # 0.546 is what sharded gradients and optimizer state come to where the parameters are whole at rest.
    Share(Case("SHARD_GRAD_OP", 4), Case("NO_SHARD", 4), 0.546),
    Share(AGAINST_FSDP_V2[0], AGAINST_FSDP_V2[1], 1.0),
    Share(AGAINST_FSDP_V2[3], AGAINST_FSDP_V2[4], 0.85),
    Share(AGAINST_FSDP_V2[3], AGAINST_FSDP_V2[4], 0.33, "traffic"),
    *(Share(recomputed, plain, 0.55) for plain, recomputed in (LONG_PLANS[:2], LONG_PLANS[2:])),
)
TIMES_MORE_PARAMETERS = 3.33  # what PyTorch's documentation says of FULL_SHARD against data parallelism
RECOMPUTE_TIME = 1.15
