"""What families of models do that other models do not."""

import torch
from casekit import NATIVE, case, check_training, sharded_and_plain
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
