"""Layers that run as one loop under SPMD, on two devices: as they run by themselves, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from casekit import MLP, MULTIPROCESS, NATIVE, SPMD, X, case, check_parameters, check_training, loss_of, part, step
from torch import nn

import torchacc
from torchacc.engines import registry


def config(**sections: Any) -> torchacc.Config:
    engine = registry.active_engine()
    fsdp = {"size": 2, "use_spmd": engine.name == SPMD}
    return torchacc.Config.from_dict(
        {"backend": engine.name.partition("-")[0], "compute": {"scan_layers": True}, "dist": {"fsdp": fsdp}, **sections}
    )


def scanned_and_plain(make: Callable[[], nn.Module] = MLP) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    plain = make()
    model = make()
    model.load_state_dict(plain.state_dict())
    return torchacc.accelerate(model, None, config()), plain


def partly_frozen() -> nn.Module:
    model = MLP()
    for layer in model.layers:
        layer[0].bias.requires_grad_(False)
    return model


@case([SPMD, NATIVE], each={"all": MLP, "a-part": partly_frozen})
def scanned_model_trains(make: Callable[[], nn.Module]) -> None:
    check_training(*scanned_and_plain(make))


@case([SPMD])
def scanned_model_compiles_once_and_evaluates() -> None:
    model, plain = scanned_and_plain()
    optimizer, plain_optimizer = (torch.optim.Adam(each.parameters(), eps=1e-4) for each in (model, plain))
    graphs = []
    for _ in range(3):
        step(model, part(X), optimizer)
        step(plain, X, plain_optimizer)
        graphs.append(torchacc.compile_report().graphs)
    assert graphs == [graphs[0]] * 3
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(part(X)).cpu(), plain.eval()(X), rtol=1e-5, atol=1e-6)
    assert list(torchacc.full_state_dict(model)) == list(plain.state_dict())
    assert [*model.layers] == [model.layers[0], model.layers[1]]


class Dropping(nn.Module):
    """Linear in each layer's weight, so that the loss is twice the product of a weight and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@case([SPMD])
def backward_drops_what_forward_has_dropped() -> None:
    model, _ = scanned_and_plain(Dropping)
    x = registry.active_engine().to_device(torch.randn(4, 64))
    losses = []
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        for layer in model.layers:
            by_gradient = (layer[0].weight * layer[0].weight.grad).sum() / 2
            assert float(by_gradient) == pytest.approx(float(loss), rel=1e-4)
        losses.append(float(loss))
    assert losses[0] != losses[1], "the same numbers are dropped in each step"
    output = model(x)
    zeros = (output == 0).cpu().float().mean()
    assert 0.35 < zeros < 0.65


@case([SPMD])
def layers_drop_different_numbers() -> None:
    class Ones(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)) for _ in range(2)])
            for layer in self.layers:
                nn.init.eye_(layer[0].weight)
                nn.init.zeros_(layer[0].bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, _ = scanned_and_plain(Ones)
    output = model(registry.active_engine().to_device(torch.ones(64, 64))).detach().cpu()
    # Half is left by one layer, and a quarter by two that do not agree.
    assert (output != 0).float().mean() == pytest.approx(0.25, abs=0.05)


@case([SPMD])
def hook_on_a_scanned_layer_is_refused() -> None:
    model, _ = scanned_and_plain()
    model.layers[1].register_forward_hook(lambda *args: None)
    with pytest.raises(torchacc.EngineError, match="hook was registered on a layer"):
        model(part(X))


@case([SPMD])
def part_of_the_scanned_layers_is_refused() -> None:
    class Partial(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[:1]:
                x = layer(x)
            return self.head(x)

    model, _ = scanned_and_plain(Partial)
    with pytest.raises(torchacc.EngineError, match="a part of its layers"):
        model(part(X))


@case([MULTIPROCESS])
def scan_between_processes_is_refused() -> None:
    with pytest.raises(torchacc.ConfigError, match="scan_layers = True with one XLA process per device"):
        torchacc.accelerate(MLP(), None, config())


@case([SPMD])
def scan_with_recompute_is_refused() -> None:
    with pytest.raises(torchacc.ConfigError, match="leave memory.gc"):
        torchacc.accelerate(MLP(), None, config(memory={"gc": True}))


@case([SPMD])
def scanned_checkpoint_loads_unscanned() -> None:
    model, plain = scanned_and_plain()
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    step(model, part(X), optimizer)
    step(plain, X, plain_optimizer)
    other = MLP()
    other.load_state_dict(torchacc.full_state_dict(model))
    check_parameters(model, plain)
    torch.testing.assert_close(other(X), plain(X), rtol=1e-5, atol=1e-6)
