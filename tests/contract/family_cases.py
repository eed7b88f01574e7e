"""What families of models do that other models do not."""

import copy

import torch
from casekit import MLP, NATIVE, accelerate, case, check_training, sharded_and_plain
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
