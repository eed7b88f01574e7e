"""What one native device does, for `test_plain_model.py`: each case beside the same model in plain PyTorch.

python plain_model_program.py out/
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
from program_cases import cases_from, run_cases
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchacc
from tests.logged import heard

FOLDER = Path(sys.argv[1])
"""Where cases write, and their outcomes go."""

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(7))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head.weight = self.layers[0][0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) * self.scale).square().mean()


class Operations(TorchDispatchMode):
    """Counts what PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def both(make=Layers, optimizer=None, **sections):
    torch.manual_seed(1)
    model = make()
    plain = copy.deepcopy(model)
    config = torchacc.Config.from_dict({"backend": "native", **sections})
    return torchacc.accelerate(model, None, config), plain


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model, optimizer, clip=None):
    optimizer.zero_grad()
    loss = model(X)
    loss.backward()
    if clip is not None:
        getattr(model, "clip_grad_norm_", lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm))(clip)
    optimizer.step()
    return loss.item()


def check_same(model, plain):
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert type(one) is nn.Parameter, name
        assert torch.equal(one, other), name


def parameters_stay_what_they_are():
    model = Layers()
    before = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    torchacc.accelerate(model, None, torchacc.Config(backend="native"))
    assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == before
    assert model.head.weight is model.layers[0][0].weight


def step_runs_the_operations_of_plain_pytorch():
    names = []
    for each in both():
        optimizer = adamw(each)
        step(each, optimizer)
        with Operations() as seen:
            step(each, optimizer, clip=0.1)
        names.append([name for name in seen.names if name != "aten._local_scalar_dense.default"])
    assert names[0] == names[1]


def numbers_are_those_of_plain_pytorch():
    for sections in ({}, {"memory": {"gc": True}}, {"dist": {"fsdp": {"sharding_strategy": "NO_SHARD"}}}):
        model, plain = both(**sections)
        optimizers = adamw(model), adamw(plain)
        for _ in range(3):
            assert step(model, optimizers[0], clip=0.1) == step(plain, optimizers[1], clip=0.1)
        check_same(model, plain)


def window_adds_up_and_its_end_is_waited_for():
    model, plain = both()
    optimizers = adamw(model), adamw(plain)
    with torchacc.accumulate(model):
        model(X).backward()
        with pytest.raises(torchacc.EngineError, match=r"accumulate\(\)"):
            optimizers[0].step()
    model(X).backward()
    for _ in range(2):
        plain(X).backward()
    for optimizer in optimizers:
        optimizer.step()
    check_same(model, plain)


def optimizer_made_before_goes_on():
    torch.manual_seed(1)
    model = Layers()
    optimizer = adamw(model)
    step(model, optimizer)
    plain, other = copy.deepcopy((model, optimizer))
    torchacc.accelerate(model, None, torchacc.Config(backend="native"), optimizer)
    assert step(model, optimizer) == step(plain, other)
    check_same(model, plain)


def weights_changed_before_recompute_are_refused():
    model, _ = both(memory={"gc": True})
    loss = model(X)
    with torch.no_grad():
        model.layers[1][0].bias.mul_(0.5)
    with pytest.raises(torchacc.EngineError, match="between the module's forward and backward"):
        loss.backward()
    model(X).backward()


def autocast_of_the_script_has_no_effect_and_is_warned_of():
    model, plain = both()
    expected = plain(X)
    with heard() as messages:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(model(X), expected)
    (warned,) = [message for message in messages if "torch.autocast" in message]
    assert "config.compute.bf16" in warned


def deferred_model_gets_its_numbers():
    torch.manual_seed(1)
    plain = Layers()
    torch.manual_seed(1)
    model = torchacc.deferred_init(Layers)
    torchacc.accelerate(model, None, torchacc.Config(backend="native"))
    check_same(model, plain)


def checkpoint_goes_on_where_it_was():
    model, plain = both()
    optimizers = adamw(model), adamw(plain)
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        step(each, optimizer)
    torchacc.checkpoint.save(FOLDER / "saved", model=model, optimizer=optimizers[0])
    other, _ = both()
    again = adamw(other)
    torchacc.checkpoint.load(FOLDER / "saved", model=other, optimizer=again)
    assert step(other, again) == step(plain, optimizers[1])
    check_same(other, plain)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in torchacc.full_state_dict(other).items())
    plain.load_state_dict(torchacc.full_state_dict(other))
    optimizers[1].load_state_dict(torchacc.optim_state_dict(other, again))


def graphs_of_gradients_are_plain_pytorchs():
    found = []
    for each in both():
        gradients = torch.autograd.grad(each(X), tuple(each.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()
        found.append([parameter.grad for parameter in each.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def half_precision_is_kept_in_float32():
    model, _ = both(lambda: Layers().half())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.head.weight is model.layers[0][0].weight


def weights_step_in_backward_as_they_do_after_it():
    torch.manual_seed(1)
    model = Layers()
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    config = torchacc.Config.from_dict({"backend": "native", "memory": {"step_in_backward": True}})
    torchacc.accelerate(model, None, config, optimizer)
    for _ in range(3):
        assert step(model, optimizer) == step(plain, plain_optimizer)
        held = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert held == ["scale"], "a number steps with optimizer.step()"
    check_same(model, plain)


def backward_inside_of_a_scripts_autocast_has_the_gradients_of_the_forward():
    torch.manual_seed(1)
    model = Layers()
    plain = copy.deepcopy(model)
    torchacc.accelerate(model, None, torchacc.Config(backend="native"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(X).backward()
    plain(X).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


if __name__ == "__main__":
    run_cases(cases_from(parameters_stay_what_they_are), FOLDER)
