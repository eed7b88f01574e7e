"""The loss on text that is not trained on, and when it says to stop."""

import itertools
import math
from typing import Any

import torch
from torch import nn

from torchacc.data import AsyncLoader
from torchacc.engines.sharded_model import sharded_model
from torchacc.train.batches import take_counts
from torchacc.train.config import EarlyStoppingConfig
from torchacc.train.models import loss_of, scaling_added_losses


@torch.no_grad()
def evaluate(model: nn.Module, loader: AsyncLoader, *, max_batches: int | None = None) -> float:
    """Return the mean loss over the targets of a validation set, each counted once. Collective: every process.

    The losses wait on the device until the last batch is under way.

    Args:
        model: The model that accelerate() returned; afterwards it is in the mode that it was in.
        loader: What `shard_loader()` made of `evaluation_loader()`.
        max_batches: How many global batches to look at; None for all.
    """
    sharded = sharded_model(model)
    was_training = model.training
    model.eval()
    sums: list[torch.Tensor] = []
    num_targets = 0
    with scaling_added_losses(model, 0):
        for batch, count in take_counts(itertools.islice(loader, max_batches)):
            # Divided by 1 the loss is a sum; that of several processes comes as the mean of theirs.
            sums.append(loss_of(model, batch, 1))
            num_targets += count
    model.train(was_training)
    mean_targets = sharded.engine.group.all_reduce_mean(torch.tensor(num_targets, dtype=torch.float64))
    return math.fsum(float(value) for value in sharded.shards.fetch(sums)) / float(mean_targets)


class EarlyStopping:
    """Remembers the best loss, and for how many evaluations there was no better one."""

    def __init__(self, config: EarlyStoppingConfig | None) -> None:
        self._config = config
        self._best = math.inf
        self._waited = 0

    @property
    def is_due(self) -> bool:
        """Whether the loss has not improved for as many evaluations in a row as is allowed."""
        return self._config is not None and self._waited >= self._config.patience

    def see(self, loss: float) -> None:
        """Record an evaluation's loss."""
        if self._config is not None and loss < self._best - self._config.min_delta:
            self._best, self._waited = loss, 0
        else:
            self._waited += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what another run did."""
        self._best, self._waited = state["best"], state["waited"]
