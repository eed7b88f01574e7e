"""What `step_time.py` compares: the workload, the cases, and what is expected of their ratios. Plain data."""

from dataclasses import dataclass

from _results import Limit

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 256, 4, 8192
GLOBAL_BATCH, LENGTH = 8, 128
LEARNING_RATE = 1e-3
WORKLOAD = (
    f"GPT-2, {LAYERS} layers x {WIDTH}, {HEADS} heads, vocabulary {VOCABULARY}, global batch {GLOBAL_BATCH} x "
    f"{LENGTH}, float32, AdamW"
)


@dataclass(frozen=True)
class Case:
    """One way to train the workload."""

    name: str
    kind: str
    """What carries it out: `eager`, `compile`, `torch_xla`, `fsdp2`, or an engine of torchacc."""
    processes: int = 1
    devices: int = 1
    """Devices of one process."""
    reference: str | None = None
    """The case that its step time is divided by in the table."""
    layers: int = LAYERS
    scans: bool = False
    """Whether torchacc runs the layers as a loop."""

    @property
    def total_devices(self) -> int:
        """Devices of all processes."""
        return self.processes * self.devices


# Cases run in this order, and backwards in every second round: those that are compared are neighbours.
CASES = (
    Case("compile", "compile", reference="eager"),
    Case("native-compile-1", "native-compile", reference="compile"),
    Case("xla-spmd-2", "xla-spmd", devices=2, reference="eager"),
    Case("fsdpv2-4", "fsdpv2", devices=4, reference="eager"),
    Case("xla-spmd-4", "xla-spmd", devices=4, reference="eager"),
    Case("native-1", "native", reference="eager"),
    Case("eager", "eager"),
    Case("xla-spmd-1", "xla-spmd", reference="torch_xla"),
    Case("torch_xla", "torch_xla", reference="eager"),
    Case("xla-multiprocess-2", "xla-multiprocess", processes=2, reference="fsdp2-2"),
    Case("fsdp2-2", "fsdp2", processes=2, reference="eager"),
    Case("native-2", "native", processes=2, reference="fsdp2-2"),
    Case("native-compile-2", "native-compile", processes=2, reference="fsdp2-compile-2"),
    Case("fsdp2-compile-2", "fsdp2-compile", processes=2, reference="fsdp2-2"),
    Case("fabric-2", "fabric", processes=2, reference="fsdp2-2"),
    Case("accelerate-2", "accelerate", processes=2, reference="fsdp2-2"),
    Case("xla-fsdp-2", "xla-fsdp", processes=2, reference="fsdp2-2"),
    Case("accelerate-ddp-2", "accelerate-ddp", processes=2, reference="ddp-2"),
    Case("native-no-shard-2", "native-no-shard", processes=2, reference="ddp-2"),
    Case("ddp-2", "ddp", processes=2, reference="eager"),
)
QUICK = ["eager", "native-2", "fsdp2-2"]
"""What shows that the program works."""
NEEDS = {
    "accelerate": "accelerate",
    "accelerate-ddp": "accelerate",
    "fabric": "lightning_fabric",
    **dict.fromkeys(("fsdpv2", "torch_xla", "xla-fsdp", "xla-multiprocess", "xla-spmd"), "torch_xla"),
}
"""The package that a kind of case is not run without; see requirements.txt."""


@dataclass(frozen=True)
class Rivalry:
    """One of torchacc's cases, and whom it has to stand beside."""

    case: str
    rival: str
    """The rival's case."""
    title: str
    """The rival's name."""
    reason: str | None = None
    """Why torchacc may be slower, as far as known."""

    @property
    def same_runtime(self) -> bool:
        """Whether XLA carries out both, or neither; `torch.compile` is a runtime of its own."""
        return RUNTIMES[self.case.rpartition("-")[0]] == RUNTIMES.get(self.rival.rpartition("-")[0], self.rival)


_XLA = ("xla-spmd", "xla-multiprocess", "fsdpv2", "xla-fsdp")
RUNTIMES = {
    **dict.fromkeys(_XLA, "torch_xla"),
    **dict.fromkeys(("native-compile", "fsdp2-compile"), "compile"),
    **dict.fromkeys(("native", "native-no-shard", "fsdp2", "fabric", "accelerate", "accelerate-ddp", "ddp"), "eager"),
}
"""What runs the operations of a case, by its name without the number of devices."""
ALL_ROUND = "its step includes the loader, and the mean of the loss over the ranks; the rival has its tensors ready"
IN_LIBRARIES = (
    "half of its step are products, and a fifth is gloo's gathers and reductions, which a compiler on a CPU leaves to "
    "the same libraries"
)
BY_UNIT = "its layers and its loss are graphs of their own, so that what is around them is not fused with them"
RIVALRIES = (
    Rivalry("native-1", "eager", "plain PyTorch", "its step is the rival's; its loader is in it, too"),
    Rivalry("native-1", "compile", "torch.compile", "nothing of it is compiled without compute.compile"),
    Rivalry("native-compile-1", "compile", "torch.compile of the whole model", BY_UNIT),
    Rivalry("xla-spmd-1", "eager", "plain PyTorch"),
    Rivalry("xla-spmd-1", "compile", "torch.compile"),
    Rivalry("xla-spmd-1", "torch_xla", "hand-written torch_xla"),
    Rivalry("xla-spmd-4", "eager", "plain PyTorch on one device", "its virtual devices share the cores of one machine"),
    Rivalry("xla-spmd-4", "fsdpv2-4", "torch_xla's FSDPv2 class"),
    Rivalry("xla-multiprocess-2", "fsdp2-2", "raw FSDP2", "weights and gradients go through the host's memory"),
    Rivalry("xla-multiprocess-2", "xla-fsdp-2", "torch_xla's FSDP"),
    Rivalry("native-2", "fsdp2-2", "raw FSDP2", ALL_ROUND),
    Rivalry("native-compile-2", "fsdp2-compile-2", "raw FSDP2, each block compiled", ALL_ROUND),
    Rivalry("native-compile-2", "fsdp2-2", "raw FSDP2", IN_LIBRARIES),
    Rivalry("native-2", "fabric-2", "Lightning Fabric's FSDP2"),
    Rivalry("native-2", "accelerate-2", "Hugging Face Accelerate's FSDP2"),
    Rivalry("native-no-shard-2", "ddp-2", "PyTorch's DDP", ALL_ROUND),
    Rivalry("native-no-shard-2", "accelerate-ddp-2", "Hugging Face Accelerate's DDP", ALL_ROUND),
)


EXPECTATIONS = (
    Limit("xla-spmd-1", "torch_xla", 1.02),
    Limit("xla-spmd-1", "eager", 1.00),
    Limit("xla-spmd-4", "eager", 1.10),
    Limit("native-1", "eager", 1.01),
    Limit("native-compile-1", "compile", 1.02),
    Limit("native-2", "fsdp2-2", 1.03),
    Limit("native-compile-2", "fsdp2-compile-2", 1.00),
    Limit("native-compile-2", "fsdp2-2", 0.92, IN_LIBRARIES),
    Limit("native-no-shard-2", "ddp-2", 1.02),
    Limit("xla-multiprocess-2", "fsdp2-2", 1.25),
)
FIRST_STEPS = (
    Limit("native-compile-1", "compile", 1.00),
    Limit("native-compile-2", "fsdp2-compile-2", 1.00),
)
"""Of the first step of each case, in which it compiles."""
