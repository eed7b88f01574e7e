"""Saves in the background of real models: what is written is what was there when the save began."""

import gc
import time
import weakref

import pytest
import torch
from torch import nn

import torchacc
from tests import forkrun
from torchacc.checkpoint import CheckpointManager, loader, saver
from torchacc.engines.sharded_model import sharded_model
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
        self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 1)).sum().backward()
        self.optimizer.step()

    @torch.no_grad()
    def change_in_place(self):
        self.model[0].weight.data.fill_(torch.nan)
        self.optimizer.state[self.model[2].bias]["exp_avg"].zero_()


def tensors(path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.safetensors")}


def test_what_is_saved_is_copied_before_the_save_returns(tmp_path):
    run = Run(tmp_path)
    for step in (3, 4):  # the second into the memory of the first
        saver.save(tmp_path / "now", **run.parts)
        run.manager.save(step)
        run.change_in_place()
        run.manager.wait()
        loader.verify(tmp_path / f"step-{step:08d}")
        assert tensors(tmp_path / f"step-{step:08d}") == tensors(tmp_path / "now")
        loader.load(tmp_path / "now", **run.parts)
        run.step()
    run.manager.close()


def test_saves_that_are_pending_at_once_have_memory_of_their_own(tmp_path):
    run, pending = Run(tmp_path), {}
    run.manager.save(1)
    run.manager.wait()  # leaves memory
    for name in ("a", "b", "c"):
        saver.save(tmp_path / f"{name}-now", **run.parts)
        pending[name] = saver.snapshot(tmp_path / name, **run.parts)
        run.step()
    for name in ("b", "a", "c"):
        pending[name].write()
    run.manager.close()
    found = [tensors(tmp_path / name) for name in pending]
    assert found == [tensors(tmp_path / f"{name}-now") for name in pending]
    assert found[0] != found[1] != found[2]


def test_a_copy_that_fails_leaves_nothing_and_the_next_save_is_whole(tmp_path, monkeypatch):
    run = Run(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(saver, "_copied", lambda *_: [0] * 2**62)
        with pytest.raises(CheckpointError, match="MemoryError"):
            run.manager.save(1)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    run.manager.save(1)
    run.manager.close()
    loader.verify(tmp_path / "step-00000001")


def test_what_is_saved_may_change_between_saves(tmp_path):
    run = Run(tmp_path)
    momentum = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    doubles = torch.optim.AdamW(run.model.parameters(), lr=0.05, amsgrad=True)
    contents = {
        "adamw": run.parts,
        "model": {"model": run.model},
        "momentum": {**run.parts, "optimizer": momentum},
        "amsgrad": {**run.parts, "optimizer": doubles},
        "doubles": {**run.parts, "optimizer": doubles},
        "adamw-again": run.parts,
    }
    for optimizer in (momentum, doubles):
        run.optimizer = optimizer
        run.step()
    for name, parts in contents.items():
        if name == "doubles":
            for state in doubles.state.values():
                state["exp_avg"] = state["exp_avg"].double()
        saver.save(tmp_path / f"{name}-now", **parts)
        pending = saver.snapshot(tmp_path / name, **parts)
        with torch.no_grad():
            for parameter, state in doubles.state.items():
                parameter.add_(1)
                state["exp_avg"].add_(1)
        pending.write()
        loader.verify(tmp_path / name)
        assert tensors(tmp_path / name) == tensors(tmp_path / f"{name}-now"), name
    run.manager.close()


def test_memory_of_copies_is_freed_with_the_manager_and_the_model(tmp_path):
    run = Run(tmp_path)
    run.manager.save(1)
    run.manager.wait()
    (copies,) = [weakref.ref(copy) for copy in saver._spare[sharded_model(run.model)]][:1]
    run.manager.close()
    for _ in range(100):  # the frames of the thread that has written them may last a little longer
        if copies() is None:
            break
        time.sleep(0.02)
    assert copies() is None
    saver.snapshot(tmp_path / "a", **run.parts).write()
    kept = len(saver._spare)
    del run
    gc.collect()
    assert len(saver._spare) < kept


def test_memory_of_a_save_in_inference_mode_is_used_again(tmp_path):
    run = Run(tmp_path)
    with torch.inference_mode():
        run.manager.save(1)
    run.manager.save(2)
    run.manager.close()
    assert tensors(tmp_path / "step-00000001") == tensors(tmp_path / "step-00000002")


def test_a_program_may_end_right_after_a_save(tmp_path):
    program = """
import sys, torch, torchacc
config = torchacc.Config()
config.backend = "native"
model = torchacc.accelerate(torch.nn.Linear(4, 2), None, config)
torchacc.checkpoint.CheckpointManager(sys.argv[1], model=model, async_save=True).save(1)
"""
    done = forkrun.run("-c", program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-00000001"]
    loader.verify(tmp_path / "step-00000001")
