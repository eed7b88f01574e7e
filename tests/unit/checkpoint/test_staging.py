"""Saves in the background of real models natively, while something changes them or waits for it."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import torchacc
from torchacc.checkpoint import CheckpointManager, live, staging
from torchacc.errors import CheckpointError


class Run:
    """A model after a step, its optimizer, and a manager that saves in the background."""

    def __init__(self, folder):
        torch.manual_seed(0)
        config = torchacc.Config()
        config.backend = "native"
        self.model = torchacc.accelerate(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)), None, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.parts = {"model": self.model, "optimizer": self.optimizer}
        self.manager = CheckpointManager(folder, **self.parts, async_save=True)
        self.backward()
        self.optimizer.step()

    def backward(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 1)).sum().backward()


class Held:
    """Keeps copies in the background from beginning until it lets them."""

    def __init__(self, monkeypatch):
        self.gate, room = threading.Event(), staging.Staging.room
        self.asked = threading.Event()

        def held(own, data):
            self.asked.set()
            assert self.gate.wait(60)
            return room(own, data)

        monkeypatch.setattr(staging.Staging, "room", held)

    def let_go_soon(self):
        threading.Timer(0.1, self.gate.set).start()


def tensors(path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


CHANGES = {
    "a step": lambda run: run.optimizer.step(),
    "weights": lambda run: run.model.load_state_dict(
        {name: torch.zeros_like(value) for name, value in torchacc.full_state_dict(run.model).items()}
    ),
    "moments": lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "a load": lambda run: torchacc.checkpoint.load(run.manager.folder / "now", **run.parts),
    "another save": lambda run: torchacc.checkpoint.snapshot(run.manager.folder / "other", **run.parts),
    "restoring": lambda run: run.manager.restore(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_waits_until_what_is_saved_is_copied(tmp_path, monkeypatch, change):
    run = Run(tmp_path)
    live.save(tmp_path / "now", **run.parts)
    held = Held(monkeypatch)
    run.manager.save(3)
    assert held.asked.wait(60)
    run.backward()
    with torch.no_grad():
        run.model(torch.ones(2, 1))
    held.let_go_soon()
    CHANGES[change](run)
    assert held.gate.is_set()
    run.manager.close()
    assert tensors(tmp_path / "step-00000003").items() >= tensors(tmp_path / "now").items()


@torch.no_grad()
def heard_of(run):
    run.model[0].weight.add_(1)


@torch.no_grad()
def of_the_shard(run):
    run.model[0].weight.to_local().add_(1)


def unheard_of(run):
    run.model[0].weight.data.add_(1)


def nan(run):
    run.model[0].weight.data.fill_(torch.nan)


@pytest.mark.parametrize("change", [heard_of, of_the_shard, unheard_of, nan])
def test_a_change_by_hand_before_it_is_copied_is_found(tmp_path, monkeypatch, change):
    run = Run(tmp_path)
    run.manager.save(2)
    run.manager.wait()
    with monkeypatch.context() as patch:
        held = Held(patch)
        run.manager.save(3)
        change(run)
        held.gate.set()
        with pytest.raises(CheckpointError, match="'0.weight' was changed.* after the manager's wait"):
            run.manager.wait()
    assert run.manager.steps() == [2]
    run.manager.save(4)  # NaN are as good as other numbers
    run.manager.wait()
    change(run)
    run.manager.close()
    assert run.manager.steps() == [4, 2]


def test_a_change_of_the_optimizers_state_is_found(tmp_path, monkeypatch):
    run = Run(tmp_path)
    held = Held(monkeypatch)
    run.manager.save(2)
    run.optimizer.state[run.model[2].bias]["exp_avg"].zero_()
    held.gate.set()
    with pytest.raises(CheckpointError, match="'2.bias/exp_avg' was changed"):
        run.manager.close()


@pytest.mark.slow
def test_a_program_may_end_right_after_a_save(tmp_path):
    program = """
import sys, torch, torchacc
config = torchacc.Config()
config.backend = "native"
model = torchacc.accelerate(torch.nn.Linear(4, 2), None, config)
torchacc.checkpoint.CheckpointManager(sys.argv[1], model=model, async_save=True).save(1)
"""
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=200)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]
    live.verify(tmp_path / "step-00000001")
