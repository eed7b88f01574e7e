"""The program that pages launch: a step of a tiny model on all processes of the job."""

import argparse

import torch
from torch.utils.data import DataLoader

import torchacc

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
lr = parser.parse_args().lr

config = torchacc.Config()
config.dist.fsdp.size = torchacc.dist.world_size()
loader = DataLoader(torch.ones(8, 4), batch_size=1)
model, loader = torchacc.accelerate(torch.nn.Sequential(torch.nn.Linear(4, 4)), loader, config)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
model(next(iter(loader))).sum().backward()
optimizer.step()
