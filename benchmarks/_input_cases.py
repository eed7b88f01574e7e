"""What `input_pipeline.py` compares: documents of many lengths, and the ways to make batches of them."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAYERS, WIDTH, HEADS, VOCABULARY = 2, 128, 4, 1024
GLOBAL_BATCH, LONGEST, SHORTEST = 8, 128, 8
BATCHES = 24
"""In an epoch, where documents are not packed."""
PAD = 0

EVEN = {"max_length": LONGEST}


@dataclass(frozen=True)
class Case:
    """One way to read the documents, and what trains on them."""

    batches: str
    """How they are made, in words."""
    kind: str
    """`eager` for plain PyTorch with its own DataLoader, or an engine of torchacc."""
    devices: int = 1
    dataloader: Mapping[str, Any] = field(default_factory=dict)
    """`config.dataloader`."""
    packed: bool = False
    """Whether blocks are filled with documents, which do not see one another."""

    @property
    def name(self) -> str:
        """What tells it from the others."""
        return f"{self.layout}, {self.batches}"

    @property
    def layout(self) -> str:
        """What trains, and the number of its devices."""
        return "plain PyTorch" if self.kind == "eager" else f"{self.kind}-{self.devices}"


CASES = (
    *(
        Case(batches, "xla-spmd", devices=2, dataloader=options)
        for batches, options in (
            ("to the longest", {}),
            ("1 bucket", EVEN | {"num_buckets": 1}),
            ("4 even buckets", EVEN | {"num_buckets": 4}),
            ("8 even buckets", EVEN | {"num_buckets": 8}),
            ("powers of 2", {"buckets": [16, 32, 64, 128]}),
        )
    ),
    Case("packed", "xla-spmd", devices=2, packed=True),
    Case("to the longest", "eager"),
    Case("to the longest", "native"),
    Case("packed", "native", packed=True),
)
"""In the order in which they take turns."""
RIVAL = "plain PyTorch, to the longest"
QUICK = (RIVAL, "native-1, packed")


def documents() -> list[list[int]]:
    """Return the tokens of each document; many are short, and few are long."""
    draw = random.Random(0)
    lengths = [max(SHORTEST, min(LONGEST, round(draw.lognormvariate(3.5, 0.6)))) for _ in range(BATCHES * GLOBAL_BATCH)]
    # Small tokens are frequent, so that there is much to learn.
    return [[1 + int(draw.random() ** 4 * (VOCABULARY - 1)) for _ in range(length)] for length in lengths]
