"""Plain FSDP2, without torchacc, on every rank: train and save with dcp, or go on from a folder; print the losses."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


def make(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.BatchNorm1d(5))


def train(model, optimizer, steps, seed):
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 7, (6,))  # the same on every rank
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def along_columns(parameter):
    return Shard(1) if tuple(parameter.shape) == (5, 6) else None


if __name__ == "__main__":
    task, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    model = make(seed=0 if task == "save" else 9)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh, shard_placement_fn=along_columns)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if task == "save":
        train(model, optimizer, 3, seed=1)
    weights, state = get_state_dict(model, optimizer)
    if task == "save":
        dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    else:
        dcp.load({"model": weights, "optim": state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    losses = train(model, optimizer, 3, seed=2)
    if dist.get_rank() == 0:
        print("LOSSES", *losses)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # plain PyTorch may abort at its end: see _drain() in torchacc/engines/gloo.py
