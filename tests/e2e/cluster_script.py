"""What the templates of examples/cluster start: two steps on a mean, whose numbers each process writes down."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import torchacc


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


def main() -> None:
    torch.manual_seed(0)
    model, rows = Regression(), [{"x": torch.randn(3)} for _ in range(8)]
    size = torchacc.dist.world_size()
    config = torchacc.Config()
    config.backend = os.environ["BACKEND"]
    config.dist.fsdp.size = size
    model, loader = torchacc.accelerate(model, DataLoader(rows, batch_size=4 // size), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {"losses": losses, "size": size, "local_rank": torchacc.dist.local_rank(), "arguments": sys.argv[1:]}
    Path(f"{os.environ['OUT']}-{torchacc.dist.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
