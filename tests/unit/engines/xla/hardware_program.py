"""Run by test_hardware.py in a process of its own.

python hardware_program.py train [virtual]    one device, or SPMD's virtual device with one, as on a GPU
python hardware_program.py launch             under torch_xla.launch(), with a thread for each of two devices
"""

import json
import os
import sys
import tempfile

import torch
from torch import nn

import torchacc
from torchacc.engines.xla.spmd import SpmdEngine


def train(*, virtual: bool) -> None:
    """Train a small model, save and load it on the way, and print what came of it."""
    if virtual:
        SpmdEngine.uses_virtual_device = True
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, 4)
    model, loader = torchacc.accelerate(model, loader, torchacc.Config(backend="xla"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        losses.append(loss.item())
        with tempfile.TemporaryDirectory() as folder:
            torchacc.checkpoint.save(f"{folder}/saved", model=model, optimizer=optimizer)
            torchacc.checkpoint.load(f"{folder}/saved", model=model, optimizer=optimizer)
    import torch_xla.runtime as xr

    weights = [value.double().sum().item() for value in torchacc.full_state_dict(model).values()]
    print(json.dumps({"losses": losses, "weights": weights, "is_spmd": xr.is_spmd()}))


def spawned(index: int) -> None:
    """Be one of the threads, of which the first tells how it ended."""
    config = torchacc.Config(backend="xla")
    try:
        torchacc.accelerate(nn.Linear(4, 4), config=config)
        found = {"error": None}
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    if index == 0:
        print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(virtual=len(sys.argv) > 2)
    else:
        # torch_xla chooses the device where it is imported, which in a forked process has happened already.
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
        import torch_xla

        torch_xla.launch(spawned)
