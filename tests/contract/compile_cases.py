"""What is compiled, and how often, on two devices of each engine; and that sparing a compile changes no number."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from casekit import (
    ADAM_ABSOLUTE,
    NATIVE,
    RANK,
    SPMD,
    XLA,
    X,
    accelerate,
    adamw,
    case,
    check_parameters,
    loss_of,
    part,
    sharded_and_plain,
    step,
)
from torch import nn

import torchacc
from tests.logged import heard
from torchacc.engines import registry

WARM_UP = 3
STEPS = 5

Make = Callable[[Any], torch.optim.Optimizer]

# What spares the compiles is one code for both XLA engines: most optimizers need one of the two.
ON_BOTH: dict[str, Make] = {"adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)}
UNDER_SPMD: dict[str, Make] = {
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    # It records its state when it is made, and in a process for each device that is run with the first forward.
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, lr_decay=0.1),
}


class Narrow(nn.Module):
    """Of a size that no other case has, so that none has compiled its programs before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * scale


def num_graphs() -> int:
    return torchacc.compile_report().graphs


def train(model: nn.Module, x: torch.Tensor, make: Make) -> list[int]:
    """Train with a learning rate that starts at 0; return how many programs each step has compiled."""
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: min(1.0, index / WARM_UP))
    compiled = []
    for _ in range(STEPS):
        before = num_graphs()
        step(model, x, optimizer)
        compiled.append(num_graphs() - before)
        schedule.step()
    return compiled


@contextmanager
def torch_xla_as_it_is() -> Iterator[None]:
    """Leave an optimizer's state and numbers to PyTorch and torch_xla."""
    from torchacc.engines.xla import xla_engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_engine, "initialize_state", lambda *args: None)
        patch.setattr(xla_engine.XlaModel, "_numbers_on_device", lambda *args: nullcontext())
        yield


def check_compiles_once(make_model: Callable[[], nn.Module], make: Make, absolute: float) -> nn.Module:
    model, plain = sharded_and_plain(make_model)
    first, *later = train(model, part(X), make)
    assert first > 0
    assert later == [0] * (STEPS - 1)
    train(plain, X, make)
    check_parameters(model, plain, absolute)
    return model


@case(XLA, each=ON_BOTH)
@case([SPMD], each=UNDER_SPMD)
def warm_up_from_0_compiles_in_the_first_step_only(make: Make) -> None:
    model = check_compiles_once(Narrow, make, ADAM_ABSOLUTE)
    with torch_xla_as_it_is():
        other, _ = sharded_and_plain(Narrow)
        compiled = train(other, part(X), make)
    assert sum(compiled[1:]) > 0, "there was nothing to spare"
    expected = torchacc.full_state_dict(other)
    for name, tensor in torchacc.full_state_dict(model).items():
        assert torch.equal(tensor, expected[name]), f"{name} is not the same to the last bit"


def narrow_of_matrices() -> nn.Module:
    model = Narrow()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 2)
    return model


# These two are compared with the unsharded run alone, as torch_xla by itself compiles Rprop anew at each step, and
# takes a part of Muon to the host.


@case(XLA)
def rprop_compiles_once() -> None:
    check_compiles_once(Narrow, lambda p: torch.optim.Rprop(p, lr=0.01), ADAM_ABSOLUTE)


@case([SPMD])
def muon_compiles_once() -> None:
    # It computes its updates in bfloat16, of 8 bits of mantissa, and they are at most lr large.
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon([each for each in parameters if each.requires_grad], lr=0.01)

    check_compiles_once(narrow_of_matrices, make, 0.02)


@case(XLA)
def rates_that_meet_compile_nothing() -> None:
    model, _ = sharded_and_plain(Narrow)
    layers, head = model.layers.parameters(), model.head.parameters()
    optimizer = torch.optim.AdamW([{"params": layers, "lr": 0.03}, {"params": head, "lr": 0.02}], betas=(0.5, 0.5))
    step(model, part(X), optimizer)
    before = num_graphs()
    for rate in (0.02, 1.0, 0.0):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for state in optimizer.state.values():
            state["step"] += 100  # Adam's bias correction is 1 by then
        step(model, part(X), optimizer)
    assert num_graphs() == before


@case(XLA)
def dampened_momentum_compiles_twice_and_says_why() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)

    model, plain = sharded_and_plain(Narrow)
    first, second, *later = train(model, part(X), make)
    assert first > 0
    assert second > 0
    assert later == [0] * (STEPS - 2)
    train(plain, X, make)
    check_parameters(model, plain)
    assert any("dampening" in note for note in torchacc.compile_report().notes)


@case(XLA)
def sgd_without_momentum_has_no_state() -> None:
    model, plain = sharded_and_plain(Narrow)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, part(X), optimizer)
    assert not optimizer.state
    step(plain, X, torch.optim.SGD(plain.parameters(), lr=0.1))
    check_parameters(model, plain)


@case()
def state_that_is_loaded_before_the_first_step_stays() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.NAdam(model.parameters(), lr=0.01)

    models = sharded_and_plain(Narrow)
    for model, x in zip(models, (part(X), X), strict=True):
        first, second = make(model), make(model)
        step(model, x, first)
        second.load_state_dict(first.state_dict())
        before = num_graphs()
        for _ in range(2):
            step(model, x, second)
        assert num_graphs() == before
    check_parameters(*models, ADAM_ABSOLUTE)


@case(XLA)
def gradients_are_freed_before_the_step_runs() -> None:
    model, _ = sharded_and_plain(Narrow)
    optimizer, engine = adamw(model), registry.active_engine()
    alive = []
    with pytest.MonkeyPatch.context() as patch:
        sync = engine.sync

        def noting_sync() -> None:
            alive.append(sum(parameter.grad is not None for parameter in model.parameters()))
            sync()

        patch.setattr(engine, "sync", noting_sync)
        loss_of(model(part(X))).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    assert alive == [0]


# The watch over compiles


@dataclass(frozen=True)
class Change:
    """Something that makes another program."""

    make: Callable[[nn.Module, torch.optim.Optimizer], None]
    says: str
    warns: bool = True
    is_looked_at: bool = False
    """Whether the model has run in the same way before its training, as in transformers' Trainer."""


def longer_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, part(torch.cat([X, X])), optimizer)


def other_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model(part(X), scale=2.5)).backward()
    optimizer.step()


def frozen_head(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.head.requires_grad_(False)
    step(model, part(X), optimizer)


def evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        float(model.eval()(part(X)).sum())
    step(model.train(), part(X), optimizer)


def squared_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        float(model.eval()(part(X)).square().sum())  # another program than that of `evaluation()`
    step(model.train(), part(X), optimizer)


def other_decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0
    step(model, part(X), optimizer)


CHANGES = {
    "shape": Change(longer_batch, "argument [0] = float32["),
    "number": Change(other_number, "argument ['scale'] = 2.5"),
    "gradients": Change(frozen_head, "no gradient for head.bias and 1 more"),
    "evaluation": Change(evaluation, "eval mode, gradients off for the first time", warns=False),
    "evaluation-after-a-look": Change(
        squared_evaluation, "gradients off for the first time since its training began", warns=False, is_looked_at=True
    ),
    "setting": Change(other_decay, "weight_decay of the optimizer's group 0 went from 0.1 to 0.0"),
}


@case(XLA, each=CHANGES)
def what_is_compiled_anew_is_named(change: Change) -> None:
    from torchacc.engines.xla import xla_engine
    from torchacc.engines.xla.compile_watch import CompileWatch

    with heard(logging.WARNING) as warned, pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_engine, "_watch", CompileWatch())  # which has not warned yet
        torch.manual_seed(1)
        model = accelerate(Narrow())
        optimizer = adamw(model)
        if change.is_looked_at:
            with torch.no_grad():
                model.eval()(part(X))
            torchacc.sync()
            model.train()
        for _ in range(4):
            step(model, part(X), optimizer)
        assert torchacc.compile_report().recompiles == ()
        for _ in range(3):
            change.make(model, optimizer)
        (recompile,) = torchacc.compile_report().recompiles
    assert change.says in recompile
    assert "up to step 5 of AdamW" in recompile
    if RANK == 0:
        assert [change.says in line for line in warned] == [True] * change.warns


@case([NATIVE])
def nothing_is_compiled_natively() -> None:
    model, _ = sharded_and_plain(Narrow)
    step(model, part(X), adamw(model))
    assert torchacc.compile_report() == torchacc.CompileReport()


@case([NATIVE])
def a_graph_from_before_a_step_of_a_compiled_model_is_refused() -> None:
    compute = {"compile": True, "compile_backend": "aot_eager"}
    model = accelerate(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), size=1, compute=compute)
    optimizer = adamw(model)
    losses = [model(part(X)).pow(2).mean() for _ in range(2)]
    losses[0].backward()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] or torch.accelerator.is_available(), "on a CPU it would not be noticed"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[1].backward()


@case(XLA)
def the_report_counts() -> None:
    model = accelerate(nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)))
    optimizer, before = adamw(model), torchacc.compile_report()
    for _ in range(3):
        step(model, part(X), optimizer)
    after = torchacc.compile_report()
    assert after.graphs > before.graphs
    assert after.secs > before.secs
    assert after.cache_hits >= before.cache_hits + 2
    assert after.persistent_cache_hits == 0
    assert f"{after.graphs} programs" in str(after)


@case(XLA)
def compile_cache_on_the_cpu_is_refused() -> None:
    config = torchacc.Config.from_dict({"backend": "xla", "compute": {"compile_cache": "programs"}})
    config.dist.fsdp.size = 2
    config.dist.fsdp.use_spmd = not registry.active_engine().job.launched
    with pytest.raises(torchacc.ConfigError, match="XLA can write and not read"):
        torchacc.accelerate(Narrow(), None, config)
