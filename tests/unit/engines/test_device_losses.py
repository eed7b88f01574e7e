"""A loss that is a sum is told from a mean by its graph."""

import pytest
import torch
from torch.nn import functional as F

from torchacc.engines.device_losses import is_sum_over

X = torch.randn(4, 5, requires_grad=True)
WEIGHT = torch.randn(3, requires_grad=True)
LABELS = torch.tensor([0, 1, 2, 3])

SUMS = {
    "cross entropy": lambda: F.cross_entropy(X, LABELS, reduction="sum"),
    "squares": lambda: F.mse_loss(X, torch.zeros(4, 5), reduction="sum"),
    "by hand": lambda: X.square().sum(),
    "of rows": lambda: F.cross_entropy(X, LABELS, reduction="none").sum(),
    "two parts": lambda: F.mse_loss(X, torch.zeros(4, 5), reduction="sum") + (X.exp() - X).sum(),
    "with a penalty": lambda: X.square().sum() + 0.1 * WEIGHT.square().sum(),
    "negative": lambda: -X.log_softmax(-1).sum(),
    "a stack of rows": lambda: torch.stack([row.square().mean() for row in X]).sum(),
    "in another dtype": lambda: X.square().sum().double(),
}
MEANS = {
    "cross entropy": lambda: F.cross_entropy(X, LABELS),
    "by hand": lambda: X.square().mean(),
    "divided": lambda: X.square().sum() / 4,
    "items": lambda: F.cross_entropy(X, LABELS, reduction="sum") / torch.tensor(4),
    "with a penalty": lambda: X.square().mean() + WEIGHT.square().sum(),
    "a scale": lambda: WEIGHT[0],
    "no gradient": lambda: torch.tensor(1.0),
}


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_sums(loss):
    assert is_sum_over(4, loss())


def test_layers_of_a_batch_of_one_row_are_no_rows():
    layers = torch.stack([WEIGHT.mean(), WEIGHT.square().mean()])
    assert not is_sum_over(1, X[:1].square().mean() + layers.sum())


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_means(loss):
    assert not is_sum_over(4, loss())
