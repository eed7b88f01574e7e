"""What families of models do that other models do not."""

import pytest
import torch
from casekit import NATIVE, X, accelerate, case, part
from torch import nn

from torchacc.errors import EngineError


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
def a_forward_that_goes_around_its_units_is_refused() -> None:
    model = accelerate(_Around())
    with pytest.raises(EngineError, match="uses a weight outside of the forward of the unit that it belongs to"):
        model(part(X))
