"""A run with checkpoints that test_launch.py disturbs: `launched_training.py FAULT ENGINE NUM_STEPS FOLDER`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchacc

ROWS = 12  # of a global batch, whatever the number of processes
FAULTY_STEP = 5

fault, engine, num_steps, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
rank, size = torchacc.dist.rank(), torchacc.dist.world_size()
faulty_rank = size - 1
with (folder / f"starts-{rank}").open("a") as starts:
    starts.write(f"{size}\n")


def is_first_time() -> bool:
    marker = folder / "was-faulty"
    if marker.exists():
        return False
    marker.touch()
    return True


class Faulty(nn.Module):
    """Does what the job is to be disturbed by, in the middle of a forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if rank == faulty_rank and step == FAULTY_STEP:
            if fault == "hang" and is_first_time():
                time.sleep(1000)
            if (fault == "crash" and is_first_time()) or (fault == "hang" and size > 1):
                os._exit(9)
        return x


torch.set_num_threads(1)
torch.manual_seed(0)
config = torchacc.Config()
config.backend = engine
config.dist.fsdp.size = size
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Faulty(), nn.Dropout(0.0), nn.Linear(16, 1))
data = TensorDataset(torch.randn(4 * ROWS, 8))
model, loader = torchacc.accelerate(model, DataLoader(data, ROWS // size, shuffle=True), config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with torchacc.checkpoint.CheckpointManager(
    folder / "checkpoints", model=model, optimizer=optimizer, loader=loader, every_steps=2
) as manager:
    restored = manager.restore()
    step = restored.step if restored else 0
    losses = list(restored.extra) if restored else []
    while step < num_steps:
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(torchacc.dist.rendezvous("loss", json.dumps(loss.item()).encode()))
            losses[-1] = sum(map(json.loads, losses[-1])) / size
            manager.save_if_due(step, extra=losses)
            if fault == "wait":
                time.sleep(0.5)
            if step == num_steps:
                break
if rank == 0:
    print(json.dumps(losses))
