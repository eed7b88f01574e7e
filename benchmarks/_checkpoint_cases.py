"""What `checkpoint.py` compares: the files, the cases, and what is expected of them. Plain data."""

from dataclasses import dataclass

RANKS = 4
UNITS = 25
UNIT_SHAPES = {"weight": (1999, 2000), "bias": (2000,)}
"""Parameters of a unit, 4 million elements, which are flattened into one: 400 MB in float32."""


@dataclass(frozen=True)
class Case:
    """One way to put the rank files of a model together."""

    name: str
    reference: str | None = None
    """The case that it is compared with in the table."""


# Those that are compared are neighbours; every second round runs backwards.
CASES = (
    Case("torchacc, verified", "torch_xla"),
    Case("torchacc", "torch_xla"),
    Case("torch_xla"),
)


@dataclass(frozen=True)
class Faster:
    """How many times faster than another a case is expected to be."""

    case: str
    reference: str
    times: float


@dataclass(frozen=True)
class Lean:
    """How much memory beside what its process has anyway a case is expected to need at most."""

    case: str
    megabytes: float


EXPECTATIONS = (Faster("torchacc", "torch_xla", 2.0), Lean("torchacc", 150.0))
