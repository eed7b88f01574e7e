"""A small training run with a manager, in one process of the native engine."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchacc
from torchacc.checkpoint import CheckpointManager

NUM_SAMPLES = 12


class Run:
    """A small training run, and its manager."""

    def __init__(self, folder, seed=0, width=4, **options):
        torch.manual_seed(seed)
        config = torchacc.Config()
        config.backend = "native"
        data = TensorDataset(torch.linspace(-1, 1, NUM_SAMPLES).unsqueeze(1), torch.linspace(0, 1, NUM_SAMPLES))
        model = nn.Sequential(nn.Linear(1, width), nn.Dropout(0.3), nn.Linear(width, 1))
        self.model, self.loader = torchacc.accelerate(model, DataLoader(data, 2, shuffle=True), config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.step = 0
        self.losses: dict[int, float] = {}
        self.manager = CheckpointManager(
            folder, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, loader=self.loader, **options
        )

    def restore(self):
        restored = self.manager.restore()
        self.step = restored.step if restored else 0
        return restored

    def train(self, until: int, num_epochs: int = 3):
        for _ in range(self.loader.epochs_done, num_epochs):
            for x, y in self.loader:
                loss = (self.model(x).squeeze(1) - y).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.step += 1
                self.losses[self.step] = loss.item()
                self.manager.save_if_due(self.step, {"losses": self.losses})
                if self.step == until:
                    return


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def flip(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)
