"""What `checkpoint.py` compares: the files, the cases, and what is expected of them. Plain data."""

from dataclasses import dataclass

from _results import Limit

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


LIVE_RANKS = 4
LIVE_REFERENCES = {
    "plain write": "plain write",
    "save": "plain write",
    "dcp save": "plain write",
    "async save": "save",
    "first async save": "save",
    "plain read": "plain read",
    "load": "plain read",
    "dcp load": "plain read",
    "plain reread": "plain read",
    "reload": "plain read",
    "cold plain read": "cold plain read",
    "cold load": "cold plain read",
    "cold dcp load": "cold plain read",
}
"""The live cases that are reported, and what each is compared with."""
LIVE_EXPECTATIONS = (
    Limit("save", "plain write", 1.3, "it also computes checksums, and commits by a rename"),
    Limit("load", "plain read", 1.6, "every byte goes through the memory a second time, for its checksum"),
    Limit("load", "dcp load", 0.5, "torchacc checks every byte against its checksum, dcp none"),
    Limit("reload", "plain read", 1.6, "the same; parameters are read into the memory that they have, states are not"),
    Limit("cold load", "cold plain read", 1.6, "a rank reads many runs of bytes where its plain file is one"),
    Limit("async save", "save", 0.2, "all is copied before it returns, at the speed of the memory: that is most of it"),
)
AGAINST_DCP = {
    "save": "both write the same bytes; torchacc also computes their checksums and commits by a rename",
    "load": "torchacc checks every byte against its checksum, dcp none",
    "cold load": "torchacc checks every byte against its checksum, and its files hold whole tensors, so that a rank's "
    "pieces do not lie one after another as they do in dcp's file of a rank",
}
"""The live cases that are compared with dcp, and why torchacc may take longer."""

EXPECTATION = Limit("torchacc", "torch_xla", 1.0)
EXTRA_MB = 300.0
"""How much memory beside what its process has anyway consolidation is expected to need at most."""
