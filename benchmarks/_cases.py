"""What `step_time.py` compares: the workload, the cases, and what is expected of their ratios. Plain data."""

from dataclasses import dataclass

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
    Case("native-1", "native", reference="eager"),
    Case("xla-spmd-2", "xla-spmd", devices=2, reference="eager"),
    Case("xla-spmd-4", "xla-spmd", devices=4, reference="eager"),
    Case("eager", "eager"),
    Case("xla-spmd-1", "xla-spmd", reference="torch_xla"),
    Case("torch_xla", "torch_xla", reference="eager"),
    Case("xla-multiprocess-4", "xla-multiprocess", processes=4, reference="fsdp2-2"),
    Case("xla-multiprocess-2", "xla-multiprocess", processes=2, reference="fsdp2-2"),
    Case("fsdp2-2", "fsdp2", processes=2, reference="eager"),
    Case("native-2", "native", processes=2, reference="fsdp2-2"),
)


@dataclass(frozen=True)
class Expectation:
    """How much slower than a reference a case may be."""

    case: str
    reference: str
    limit: float | None
    """The largest ratio expected; None where the ratio is only reported."""


EXPECTATIONS = (
    Expectation("xla-spmd-1", "torch_xla", 1.02),
    Expectation("xla-spmd-1", "eager", 1.00),
    Expectation("xla-spmd-4", "eager", 1.10),
    Expectation("native-2", "fsdp2-2", 1.03),
    Expectation("xla-multiprocess-2", "fsdp2-2", 1.25),
    Expectation("xla-multiprocess-4", "fsdp2-2", None),
)
