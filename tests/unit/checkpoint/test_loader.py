"""Loads over what has been trained: parameters into the memory that is there, states into memory of their own."""

import pytest
import torch
from torch import nn

import torchacc
from torchacc.checkpoint import load, save
from torchacc.errors import CheckpointError, EngineError


class Run:
    """A model and its AdamW after a step, and a checkpoint of it."""

    def __init__(self, folder):
        torch.manual_seed(0)
        config = torchacc.Config.from_dict({"backend": "native"})
        self.model = torchacc.accelerate(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), None, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.folder = folder / "a"
        self.step()
        self.saved = self.values()
        save(self.folder, model=self.model, optimizer=self.optimizer)
        self.step()

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()

    def load(self):
        load(self.folder, model=self.model, optimizer=self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = dict(self.model.named_parameters())
        states = {f"{name}/{key}": value for name, p in named.items() for key, value in self.optimizer.state[p].items()}
        return {name: getattr(tensor, "_local_tensor", tensor).detach() for name, tensor in (named | states).items()}

    def values(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for name, tensor in self.tensors().items() if not name.endswith("/step")]

    def check(self):
        found = self.values()
        assert found.keys() == self.saved.keys()
        assert all(torch.equal(found[name], value) for name, value in self.saved.items())


def test_parameters_are_loaded_where_they_are(tmp_path):
    run = Run(tmp_path)
    parameters = list(run.model.parameters())
    before, versions = [p.data_ptr() for p in parameters], [p._version for p in parameters]
    run.load()
    run.check()
    assert [p.data_ptr() for p in parameters] == before
    assert all(p._version > version for p, version in zip(parameters, versions, strict=True))


def test_an_earlier_state_of_the_optimizer_is_left_as_it_was(tmp_path):
    run = Run(tmp_path)
    expected, earlier = run.values(), run.optimizer.state_dict()
    run.load()
    run.optimizer.load_state_dict(earlier)
    found = run.values()
    assert all(torch.equal(found[name], value) for name, value in expected.items() if "/" in name)


def of_the_parameter(parameter, state):
    state["exp_avg"] = parameter.detach()


def of_each_other(_, state):
    state["exp_avg"] = state["exp_avg_sq"]


def missing(_, state):
    del state["exp_avg"]


@pytest.mark.parametrize("alter", [of_the_parameter, of_each_other, missing])
def test_states_get_memory_of_their_own(tmp_path, alter):
    run = Run(tmp_path)
    parameter = next(iter(run.model.parameters()))
    alter(parameter, run.optimizer.state[parameter])
    run.load()
    run.check()
    assert len(set(run.addresses())) == len(run.addresses())
    run.step()


def test_parameters_of_one_storage_are_loaded_where_they_are(tmp_path):
    run = Run(tmp_path)
    parameters = [p for p in run.model.parameters() if not hasattr(p, "_local_tensor")]
    flat = torch.cat([p.detach().view(-1) for p in parameters])
    for parameter, data in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = data.view(parameter.shape)
    run.load()
    run.check()


def test_a_load_that_fails_halfway_leaves_nothing_that_runs(tmp_path):
    run = Run(tmp_path)
    file = run.folder / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not as it was written"):
        run.load()
    with pytest.raises(EngineError, match="cannot run, step or be saved"):
        run.step()
    content[-1] ^= 1
    file.write_bytes(content)
    run.load()
    run.check()
