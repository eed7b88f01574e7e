"""Parameters that are not those that were sharded: listed before `accelerate()`, or put into the model after it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from casekit import (
    ADAM_ABSOLUTE,
    ALL,
    ENGINE,
    MLP,
    NATIVE,
    RANK,
    SPMD,
    X,
    accelerate,
    case,
    check_equal,
    check_gradients,
    check_parameters,
    check_still_trains,
    loss_of,
    part,
    plain_value,
    sharded_and_plain,
)
from torch import nn

import torchacc
from torchacc.engines import registry

USES: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip-norm": lambda listed: nn.utils.clip_grad_norm_(listed, 1.0),
    "clip-value": lambda listed: nn.utils.clip_grad_value_(iter(listed), 1.0),
    "gradient": lambda listed: listed[0].grad,
    "norm": lambda listed: listed[0].norm(),
    "average": lambda listed: torch.zeros(8, 8).lerp_(listed[0], 0.5),
    "edit": lambda listed: listed[0].data.mul_(0.5),
    "another-module": lambda listed: nn.functional.linear(torch.ones(1, 8), listed[0]),
}


@case(each=USES)
def parameters_listed_before_are_refused(use: Callable[[list[nn.Parameter]], Any]) -> None:
    model = MLP()
    listed = list(model.parameters())
    accelerate(model)
    loss_of(model(part(X))).backward()
    with pytest.raises(torchacc.ConfigError, match=r"listed before accelerate\(\)"):
        use(listed)
    assert sum(parameter.numel() for parameter in listed) == 180
    assert "Parameter" in repr(listed[0])


@case()
def window_of_one_model_leaves_another_to_be_clipped() -> None:
    first, second = accelerate(MLP()), accelerate(MLP())
    with torchacc.accumulate(first):
        loss_of(first(part(X))).backward()
    assert nn.utils.clip_grad_norm_(second.parameters(), 1.0) == 0
    loss_of(second(part(X))).backward()
    assert nn.utils.clip_grad_norm_(second.parameters(), 1.0) > 0
    for clip in [] if ENGINE == SPMD else [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_]:
        with pytest.raises(torchacc.EngineError, match="accumulate"):
            clip(first.parameters(), 1.0)


def _assign(model: nn.Module) -> None:
    model.head.bias = nn.Parameter(torch.zeros(4))


def _replace_layer(model: nn.Module) -> None:
    model.head = nn.Linear(8, 4)


def _drop_layer(model: nn.Module) -> None:
    del model.layers[1]


def _add(model: nn.Module) -> None:
    model.register_parameter("extra", nn.Parameter(torch.ones(4)))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "assigned": _assign,
    "another-layer": _replace_layer,
    "one-less": _drop_layer,
    "one-more": _add,
    "parametrized": lambda model: nn.utils.parametrizations.weight_norm(model.head),
}


@case(each=CHANGES)
def parameters_put_into_a_sharded_model_are_refused(change: Callable[[nn.Module], Any]) -> None:
    model = accelerate(MLP())
    change(model)
    with pytest.raises(torchacc.EngineError, match=r"is not the one that accelerate\(\) has sharded"):
        model(part(X))
    with pytest.raises(torchacc.EngineError, match=r"is not the one that accelerate\(\) has sharded"):
        torchacc.full_state_dict(model)


@case(ALL)
def functional_call_is_refused_and_leaves_the_model_as_it_was() -> None:
    model, plain = sharded_and_plain()
    halves = {name: parameter.detach() * 0.5 for name, parameter in model.named_parameters()}
    whole = {name: torch.zeros(parameter.shape) for name, parameter in plain.named_parameters()}
    for values in (halves, whole):
        with pytest.raises(torchacc.EngineError, match="functional_call"):
            torch.func.functional_call(model, values, (part(X),))
    check_still_trains(model, plain)


@case()
def transforms_of_torch_func_are_refused() -> None:
    model, plain = sharded_and_plain()
    with pytest.raises(torchacc.EngineError, match=r"cannot run inside of a transform of torch\.func"):
        torch.func.jvp(model, (part(X),), (part(X),))
    check_still_trains(model, plain)


@case()
def modules_without_parameters_may_be_replaced() -> None:
    model, plain = sharded_and_plain()
    for each in (model, plain):
        each.layers[0][1] = nn.ReLU()
        each.dropout = nn.Dropout(0.0)
    check_still_trains(model, plain)


@case([NATIVE])
def filled_by_torch_as_the_whole_is() -> None:
    model, plain = sharded_and_plain()
    plain.to(registry.active_engine().device)
    fillers: list[Callable[[torch.Tensor], Any]] = [
        nn.init.uniform_,
        nn.init.kaiming_uniform_,
        nn.init.kaiming_normal_,
        nn.init.xavier_normal_,
        nn.init.trunc_normal_,
        lambda w: nn.init.constant_(w, 0.3),
        nn.init.eye_,
        lambda w: w.data.normal_(),
        lambda w: w.data.add_(torch.randn_like(w)),
        lambda w: nn.functional.elu(w.data, inplace=True),
    ]
    drawn = []
    for each in (model, plain):
        torch.manual_seed(5)  # the same in every process, as in most scripts
        for fill in fillers:
            fill(each.head.weight)
            drawn.append(each.head.weight.detach().clone())
        drawn.append(torch.rand(()))
    half = len(drawn) // 2
    for index, (found, expected) in enumerate(zip(drawn[:half], drawn[half:], strict=True)):
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        check_equal(found, expected, f"after filler {index}")
    with pytest.raises(RuntimeError, match="leaf Variable"):
        model.head.weight.normal_()


class Routed(nn.Module):
    """Uses another parameter by what the first row says, as experts without tokens are left out."""

    def __init__(self, shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.experts = nn.ParameterList([nn.Parameter(torch.full(shape, 1.0 + index)) for index in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.new_zeros(())
        for half in x.chunk(2) if len(x) == len(X) else [x]:
            expert = self.experts[int(half[0, 0] > X[0, 0])]
            loss = loss + (self.body(half) * expert).square().mean() / (len(x) // 2)
        return loss


STRATEGIES = {"full": "FULL_SHARD", "grad-op": "SHARD_GRAD_OP", "none": "NO_SHARD"}


@case([NATIVE], each=STRATEGIES)
def parameters_that_some_processes_have_not_used(strategy: str) -> None:
    model, plain = sharded_and_plain(Routed, sharding_strategy=strategy)
    x = X.clone()
    x[2, 0] = X[0, 0] + 1  # so that the other half takes another
    for _ in range(2):
        for each, rows in ((model, part(x)), (plain, x)):
            each.zero_grad()
            each(rows).backward()
        for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            whole = None if found.grad is None else plain_value(found.grad)
            check_equal(whole, expected.grad, f"gradient of {name}")
    assert plain.experts[2].grad is None
    assert all(expert.grad is not None for expert in plain.experts[:2])


@case([NATIVE], each=STRATEGIES)
def parameters_of_a_window_that_some_processes_have_not_used(strategy: str) -> None:
    model, plain = sharded_and_plain(Routed, sharding_strategy=strategy)
    x, last = X.clone(), X[:1].repeat(4, 1)
    x[2, 0] = X[0, 0] + 1
    with torchacc.accumulate(model):
        model(part(x)).backward()
    plain(x).backward()
    for each, rows in ((model, part(last)), (plain, last)):
        each.experts[1].requires_grad_(False)  # it keeps the gradient that one process has
        each(rows).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = None if found.grad is None else plain_value(found.grad)
        check_equal(whole, expected.grad, f"gradient of {name}")


@case([NATIVE], each=STRATEGIES)
def optimizers_that_step_in_backward_leave_unused_parameters(strategy: str) -> None:
    model, plain = sharded_and_plain(Routed, sharding_strategy=strategy)
    x = X.clone()
    x[2, 0] = X[0, 0] + 1
    called: dict[nn.Module, list[str]] = {model: [], plain: []}
    for each, names in called.items():
        for name, parameter in each.named_parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.01, eps=1e-4, weight_decay=0.5)
            parameter.register_post_accumulate_grad_hook(partial(_step_one, names, name, optimizer))
        for _ in range(2):
            each(part(x) if each is model else x).backward()
    assert sorted(called[model]) == sorted(called[plain])
    assert "experts.2" not in called[plain]
    check_parameters(model, plain, ADAM_ABSOLUTE)


def _step_one(names: list[str], name: str, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    names.append(name)
    optimizer.step()
    optimizer.zero_grad()


class Chosen(nn.Module):
    """Runs the unit that it is told to, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])

    def forward(self, x: torch.Tensor, chosen: int | None) -> torch.Tensor:
        x = self.body(x)
        return self.head(x if chosen is None else self.layers[chosen](x)).square().mean()


@case([NATIVE], each=STRATEGIES)
def units_that_run_in_one_part_of_a_window_only(strategy: str) -> None:
    model, plain = sharded_and_plain(Chosen, sharding_strategy=strategy, wrap_layer_cls={"Sequential"})
    for first, second in ((0, 1), (1, None), (None, 0)):
        for each, rows in ((model, part(X)), (plain, X)):
            with torchacc.accumulate(model) if each is model else nullcontext():
                each(rows, first).backward()
            each(rows, second).backward()
        check_gradients(model, plain)


class Forces(MLP):
    """Takes a gradient inside of its forward, as models of molecules do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x).square()
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return forces.square().mean() + energy.mean()


@case([NATIVE], each=STRATEGIES)
def gradients_taken_inside_of_forward(strategy: str) -> None:
    model, plain = sharded_and_plain(Forces, sharding_strategy=strategy)
    for _ in range(2):
        model(part(X)).backward()
        plain(X).backward()
        check_gradients(model, plain)


@case([NATIVE], each=STRATEGIES)
def model_is_recomputed_as_one(strategy: str) -> None:
    model, plain = sharded_and_plain(sharding_strategy=strategy)
    for each, rows in ((model, part(X)), (plain, X)):
        loss_of(torch.utils.checkpoint.checkpoint(each, rows, use_reentrant=False)).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        check_equal(plain_value(found.grad), expected.grad, f"gradient of {name}")


@case([NATIVE])
def number_that_some_processes_have_not_used_is_refused() -> None:
    model, _ = sharded_and_plain(lambda: Routed(()))
    x = X.clone()
    x[2, 0] = X[0, 0] + 1
    with pytest.raises(torchacc.EngineError, match=r"has used the parameter 'experts\.0', which has no dimensions"):
        model(part(x))
    model(part(X[:1].repeat(4, 1))).backward()


class Skipping(MLP):
    """Leaves out a layer that depends on the process, as layers dropped at random do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[RANK](x))


@case([NATIVE])
def units_that_some_processes_have_not_run_are_refused() -> None:
    model, _ = sharded_and_plain(Skipping, wrap_layer_cls={"Sequential"})
    with pytest.raises(torchacc.EngineError, match="have run other units of the model than each other"):
        loss_of(model(part(X))).backward()
