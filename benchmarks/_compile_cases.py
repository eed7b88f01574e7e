"""What `compile.py` compares, and what is expected of it. Plain data."""

from _cases import LAYERS, Case
from _results import Limit

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


ONE_PROGRAM = [case.name for case in CASES if case.kind == "xla-spmd"]
"""The cases that are expected to compile one program in all of their steps."""
EXPECTATIONS = (
    *(Limit(f"xla-spmd, {layers} layers", f"torch_xla, {layers} layers", 0.65) for layers in DEPTHS),
    Limit("scan_layers, 32 layers", "xla-spmd, 32 layers", 0.5),
)
"""Of the time until the second step is done."""
