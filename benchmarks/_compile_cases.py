"""What `compile.py` compares, and what is expected of it. Plain data."""

from dataclasses import dataclass

from _cases import LAYERS, Case

STEPS = 4
DEPTHS = (LAYERS, 8, 16, 32)
KINDS = ("torch_xla", "xla-spmd", "scan_layers")

CASES = (
    *(Case(f"torch_xla, {layers} layers", "torch_xla", layers=layers) for layers in DEPTHS),
    *(Case(f"xla-spmd, {layers} layers", "xla-spmd", layers=layers) for layers in DEPTHS),
    *(Case(f"scan_layers, {layers} layers", "xla-spmd", layers=layers, scans=True) for layers in DEPTHS),
    Case(f"xla-spmd on 4 devices, {LAYERS} layers", "xla-spmd", devices=4),
)
QUICK = [f"{kind}, {LAYERS} layers" for kind in KINDS[:2]]
"""What shows that the program works."""


@dataclass(frozen=True)
class Graphs:
    """How many programs a case is expected to compile in all of its steps."""

    case: str
    graphs: int


@dataclass(frozen=True)
class Sooner:
    """What part of another case's time a case is expected to need until its second step is done."""

    case: str
    reference: str
    part: float


EXPECTATIONS = (
    *(Graphs(case.name, 1) for case in CASES if case.kind == "xla-spmd"),
    *(Sooner(f"xla-spmd, {layers} layers", f"torch_xla, {layers} layers", 0.65) for layers in DEPTHS),
    Sooner("scan_layers, 32 layers", "xla-spmd, 32 layers", 0.5),
)
