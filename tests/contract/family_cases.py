"""What families of models do that other models do not."""

import copy

import torch
from casekit import (
    MLP,
    NATIVE,
    X,
    accelerate,
    case,
    check_equal,
    check_gradients,
    check_training,
    loss_of,
    part,
    plain_value,
    sharded_and_plain,
)
from torch import nn


class _Around(nn.Module):
    """Calls its layers' forward without the hooks of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


@case((NATIVE,))
def forward_goes_around_its_units() -> None:
    check_training(*sharded_and_plain(_Around))


class _Regression(nn.Module):
    """A frozen body under a head of one row, of which the second device holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


@case((NATIVE,))
def clipping_where_a_device_has_no_gradient() -> None:
    model, plain = sharded_and_plain(_Regression)
    loss_of(model(part(X))).backward()
    loss_of(plain(X)).backward()
    check_equal(plain_value(model.clip_grad_norm_(0.1)), nn.utils.clip_grad_norm_(plain.parameters(), 0.1), "norm")
    check_gradients(model, plain)


_ACTIVATION = nn.GELU()
"""A module that every model of a library uses, as transformers' own `gelu`, which XLM calls."""


def _make_with_shared() -> nn.Module:
    model = MLP()
    model.activation = _ACTIVATION
    return model


@case()
def module_of_all_models_keeps_nothing_of_one() -> None:
    before = {name: copy.copy(value) for name, value in vars(_ACTIVATION).items()}
    accelerate(_make_with_shared())
    assert vars(_ACTIVATION) == before
    check_training(*sharded_and_plain(_make_with_shared))  # copies a second one
