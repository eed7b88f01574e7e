"""How the learning rate goes over a stage."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchacc.errors import ConfigError
from torchacc.train.config import Schedule

DECAYS: dict[Schedule, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""What is left of the distance to the lowest learning rate, from 1, by the progress after the warm-up, from 0 to 1."""


def factor(step: int, *, name: Schedule, total_steps: int, warmup_steps: int, min_lr_ratio: float) -> float:
    """Return what the learning rate is multiplied with in one step.

    The warm-up rises evenly to 1, which its last step has; the decay ends at `min_lr_ratio` after the last step.

    Args:
        step: The step, counted from 0.
        name: One of `DECAYS`.
        total_steps: Steps of the stage.
        warmup_steps: Those of them that the warm-up takes.
        min_lr_ratio: The lowest factor.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * DECAYS[name](progress)


def make_scheduler(
    optimizer: Optimizer, *, name: Schedule, total_steps: int, warmup_steps: int, min_lr_ratio: float
) -> LambdaLR:
    """Make the scheduler of a stage, to be stepped after each step of the optimizer.

    Args:
        optimizer: The optimizer.
        name: One of `DECAYS`.
        total_steps: Steps of the stage.
        warmup_steps: Those of them that the warm-up takes.
        min_lr_ratio: The lowest learning rate, as a share of the highest.

    Raises:
        ConfigError: The warm-up is longer than the stage.
    """
    if warmup_steps > total_steps:
        raise ConfigError(
            f"scheduler.warmup_steps = {warmup_steps}: the stage has {total_steps} steps, so that its learning rate "
            f"would never be reached: write at most {total_steps}"
        )

    def at(step: int) -> float:
        return factor(step, name=name, total_steps=total_steps, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)

    return LambdaLR(optimizer, at)
