"""Rank 1 fails in its third step; test_failure.py looks at what the job then does."""

import sys

import torch
from torch import nn

import torchacc

config = torchacc.Config()
config.backend = sys.argv[1]
config.dist.fsdp.size = 3
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
batches = [torch.randn(2, 8) for _ in range(300)]
model, loader = torchacc.accelerate(model, batches, config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, x in enumerate(loader):
    if step == 3 and torchacc.dist.rank() == 1:
        raise ValueError("rank one has had enough")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
