"""What `trainer_overhead.py` compares: one training, carried out by several loops, and its text."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GLOBAL_BATCH, LENGTH = 4, 128
LEARNING_RATE = 1e-4
"""Small, so that losses can be compared: with 1e-3 training multiplies the last bit of one weight by 1e5."""
TEXT = "text.jsonl"
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wise", "owls")
LOG_EVERY_STEPS = 10
"""Also the steps of a turn, so that each turn has one log line, and where a case saves one checkpoint."""
MODEL: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 256,
    "n_head": 4,
    "n_positions": LENGTH,
    "vocab_size": 4096,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


@dataclass(frozen=True)
class Case:
    """One loop on one engine."""

    loop: str
    """`bare`, `staged` (torchacc's trainer) or `hf` (torchacc's subclass of transformers' Trainer)."""
    engine: str
    """`native`, or `xla` for SPMD."""
    devices: int = 1
    log_every_steps: int = LOG_EVERY_STEPS
    tensorboard: bool = False
    save_every_steps: int | None = None

    @property
    def name(self) -> str:
        """What tells it from the others."""
        extras = [
            *(["logging each step, TensorBoard"] if self.tensorboard else []),
            *([f"saving every {self.save_every_steps}"] if self.save_every_steps else []),
        ]
        return ", ".join([f"{self.loop} on {self.layout}", *extras])

    @property
    def layout(self) -> str:
        """The engine and the number of its devices."""
        return f"{'xla-spmd' if self.engine == 'xla' else 'native'}-{self.devices}"

    @property
    def reference(self) -> str:
        """The bare loop on the same engine."""
        return Case("bare", self.engine, self.devices).name


CASES = (
    Case("staged", "native"),
    Case("staged", "native", log_every_steps=1, tensorboard=True),
    Case("bare", "native"),
    Case("hf", "native"),
    Case("staged", "native", save_every_steps=LOG_EVERY_STEPS),
    Case("staged", "xla", devices=2),
    Case("bare", "xla", devices=2),
    Case("hf", "xla", devices=2),
)
"""In the order in which they take turns: those that are compared are near each other."""
QUICK = ("staged on native-1", "bare on native-1")
LOOPS = {
    "staged": "torchacc's trainer",
    "hf": "transformers' Trainer on torchacc",
    "bare": "a loop by hand",
}
REASONS = {
    "staged": "metrics, the schedule and the loss by targets are work of the host in each step",
    "hf": "transformers' callbacks, its counting of items and its own sums of losses are work of the host in each step",
    "saving": "the checkpoint is copied while training waits, and written on the cores that train",
}
"""Why a trainer takes longer, as far as known."""


def write_text(folder: Path, total_steps: int) -> None:
    """Write documents with more tokens than the steps take."""
    draw = random.Random(0)
    words = 2 * total_steps * GLOBAL_BATCH * LENGTH
    sizes = [draw.randint(20, 400) for _ in range(words // 200)]
    lines = [json.dumps({"text": " ".join(draw.choices(WORDS, k=size))}) + "\n" for size in sizes]
    (folder / TEXT).write_text("".join(lines), encoding="utf-8")
