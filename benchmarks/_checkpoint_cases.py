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


@dataclass(frozen=True)
class Share:
    """What part of another case's time a live case is expected to take at most."""

    case: str
    reference: str
    part: float
    reason: str
    """Why it may take more, as far as known."""


LIVE_RANKS = 4
# Writing and reading plain files is the limit: 80 % of its throughput is 1 / 0.8 of its time.
LIVE_REFERENCES = {
    "plain write": "plain write",
    "save": "plain write",
    "dcp save": "plain write",
    "async save": "save",
    "plain read": "plain read",
    "load": "plain read",
    "dcp load": "plain read",
    "plain reread": "plain reread",
    "reload": "plain reread",
    "cold plain read": "cold plain read",
    "cold load": "cold plain read",
    "cold dcp load": "cold plain read",
}
"""The live cases that are reported, and what each is compared with."""
LIVE_EXPECTATIONS = (
    Share("save", "plain write", 1 / 0.8, "it also computes checksums, and commits by a rename"),
    Share("load", "plain read", 1 / 0.8, "every byte goes through the memory a second time, for its checksum"),
    Share("reload", "plain reread", 1 / 0.8, "the same, beside a read that the system hands out no memory for"),
    Share("cold load", "cold plain read", 1 / 0.8, "a rank reads many runs of bytes where its plain file is one"),
    Share("async save", "save", 0.1, "planning what goes where, and agreeing on it, is most of it"),
)
AGAINST_DCP = {
    "save": "both write the same bytes; torchacc also computes their checksums and commits by a rename",
    "load": "torchacc checks every byte against its checksum, dcp none",
    "cold load": "torchacc checks every byte against its checksum, and its files hold whole tensors, so that a rank's "
    "pieces do not lie one after another as they do in dcp's file of a rank",
}
"""The live cases that are compared with dcp, and why torchacc may take longer."""

EXPECTATIONS = (Faster("torchacc", "torch_xla", 2.0), Lean("torchacc", 150.0))
