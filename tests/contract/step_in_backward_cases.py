"""Weights that step in backward: as without to the last digit, and in any order of calls as without, or refused."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from casekit import (
    ADAM,
    ADAM_ABSOLUTE,
    MLP,
    NATIVE,
    RANK,
    X,
    by_rank,
    case,
    check_equal,
    loss_of,
    make_config,
    part,
    plain_value,
)
from replacing_cases import Routed
from sequence_cases import make, part_of, plain
from torch import nn

import torchacc
from torchacc import EngineError

Optimizer = torch.optim.Optimizer
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, **ADAM),
    "adamw-fused": partial(torch.optim.AdamW, **ADAM, fused=True),
    "adamw-foreach": partial(torch.optim.AdamW, **ADAM, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nadam": partial(torch.optim.NAdam, lr=1e-3, eps=1e-4),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-4),
}
ADAMW = OPTIMIZERS["adamw"]


def sharded(
    model: nn.Module,
    make_optimizer: Callable[..., Optimizer] = ADAMW,
    *,
    steps_in_backward: bool = True,
    **options: Any,
) -> tuple[nn.Module, Optimizer]:
    config = make_config(memory={"step_in_backward": steps_in_backward, **options.pop("memory", {})}, **options)
    optimizer = make_optimizer(model.parameters())
    torchacc.accelerate(model, None, config, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, x: torch.Tensor, steps: int = 3) -> None:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    for _ in range(steps):
        loss_of(model(x)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: plain_value(tensor).clone() for name, tensor in torchacc.full_state_dict(model).items()}


def check_same(model: nn.Module, other: nn.Module) -> None:
    found, expected = values(model), values(other)
    for name in expected:
        assert torch.equal(found[name], expected[name]), f"rank {RANK}: {name}"


def seeded(build: Callable[[], nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(1)
    return build()


STRATEGIES = {"full": "FULL_SHARD", "grad-op": "SHARD_GRAD_OP"}


@case([NATIVE], each=OPTIMIZERS)
def weights_step_in_backward_to_the_last_digit(make_optimizer: Callable[..., Optimizer]) -> None:
    for strategy in STRATEGIES.values():
        model, optimizer = sharded(seeded(), make_optimizer, sharding_strategy=strategy)
        without, later = sharded(seeded(), make_optimizer, steps_in_backward=False, sharding_strategy=strategy)
        alone = seeded()
        train(model, optimizer, part(X))
        train(without, later, part(X))
        train(alone, make_optimizer(alone.parameters()), X)
        check_same(model, without)
        for name, expected in alone.state_dict().items():
            check_equal(values(model)[name], expected, name, ADAM_ABSOLUTE)


BESIDES: Mapping[str, dict[str, Any]] = {
    "tied": {"family": "gpt2"},
    "recomputed": {"family": "llama", "memory": {"gc": True}},
    "bf16": {"family": "llama", "compute": {"bf16": True}},
    "chunked-loss": {"family": "gpt2", "compute": {"chunked_loss": 8}},
    "experts": {"family": "mixtral"},
    "compiled": {"family": "llama", "compute": {"compile": True, "compile_backend": "aot_eager"}},
    "tp": {"family": "llama", "dist": {"fsdp": {"size": 1}, "tp": {"size": 2}}},
    "sp": {"family": "llama", "dist": {"fsdp": {"size": 1}, "sp": {"size": 2}}},
}


@case([NATIVE], each=BESIDES)
def weights_of_transformers_step_in_backward_to_the_last_digit(chosen: Mapping[str, Any]) -> None:
    options = {"dist": {"fsdp": {"size": 2}}, **chosen}
    family, memory = options.pop("family"), options.pop("memory", {})
    found = []
    for steps in (True, False):
        model = make(family)
        config = {"backend": "native", "memory": {"step_in_backward": steps, **memory}, **options}
        optimizer = ADAMW(model.parameters())
        torchacc.accelerate(model, None, torchacc.Config.from_dict(config), optimizer)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(**part_of(model, plain())).loss
            loss.backward()
            assert not steps or all(parameter.grad is None for parameter in model.parameters())
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        found.append((losses, values(model), optimizer.state_dict()))
    (losses, weights, state), (expected, expected_weights, expected_state) = found
    assert losses == expected
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert state["param_groups"] == expected_state["param_groups"]


@case([NATIVE])
def weights_frozen_unused_and_used_again_step_in_backward() -> None:
    """A parameter without a gradient does not step: neither its decay nor its momentum moves it."""
    both = [sharded(seeded(Routed), steps_in_backward=steps) for steps in (True, False)]
    rows = X.clone()
    rows[2, 0] = X[0, 0] + 1
    for x, frozen in ((rows, None), (X[:1].repeat(4, 1), None), (rows, 0), (rows, None)):
        for model, optimizer in both:
            model.requires_grad_(True)
            if frozen is not None:
                model.experts[frozen].requires_grad_(False)
            optimizer.zero_grad()
            model(part(x)).backward()
            optimizer.step()
    check_same(both[0][0], both[1][0])


@case([NATIVE])
def weights_of_units_that_run_twice_step_once_in_backward() -> None:
    both = [sharded(seeded(), steps_in_backward=steps) for steps in (True, False)]
    for model, optimizer in both:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(part(X)) + model(part(X).flip(0))).backward()
            optimizer.step()
    check_same(both[0][0], both[1][0])


@case([NATIVE])
def one_unit_of_gradients_is_held_while_weights_step_in_backward() -> None:
    held: list[int] = []
    model, optimizer = sharded(seeded())
    own = list(model.parameters())
    model.layers[0].register_full_backward_hook(
        lambda *_: held.append(sum(parameter.grad is not None for parameter in own))
    )
    train(model, optimizer, part(X), steps=1)
    assert held == [0]


def used_outside(model: nn.Module, optimizer: Optimizer) -> None:
    loss = loss_of(model(part(X))) + 0.1 * model.head.weight.square().sum()
    loss.backward()


def in_accumulate(model: nn.Module, optimizer: Optimizer) -> None:
    with torchacc.accumulate(model):
        loss_of(model(part(X))).backward()


def backward(model: nn.Module, optimizer: Optimizer) -> None:
    loss_of(model(part(X))).backward()


def two_backwards(model: nn.Module, optimizer: Optimizer) -> None:
    loss = loss_of(model(part(X)))
    loss.backward(retain_graph=True)
    loss.backward()


def no_zero_grad(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()
    backward(model, optimizer)


def step_twice(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, optimizer)
    optimizer.step()
    optimizer.step()


def dropped(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, optimizer)
    model.zero_grad()


def evaluated(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, optimizer)
    with torch.no_grad():
        model(part(X))


def saved(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, optimizer)
    torchacc.full_state_dict(model)


def optimizer_saved(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, optimizer)
    optimizer.state_dict()


def changed_rate(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def scaled(model: nn.Module, optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss_of(model(part(X)))).backward()
    scaler.step(optimizer)


def hooked(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    backward(model, optimizer)


def zeroed(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def with_graph(model: nn.Module, optimizer: Optimizer) -> None:
    loss_of(model(part(X))).backward(create_graph=True)


REFUSED: Mapping[str, tuple[Callable[[nn.Module, Optimizer], object], str]] = {
    "two-backwards": (two_backwards, "second backward.. without optimizer"),
    "no-zero-grad": (no_zero_grad, "second backward.. without zero_grad"),
    "two-steps": (step_twice, "step.. twice after one backward"),
    "dropped-gradients": (dropped, "to leave a step out"),
    "zeros": (zeroed, "set_to_none=False"),
    "accumulate": (in_accumulate, r"accumulate\(\) with memory\.step_in_backward"),
    "clipping": (lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0), "clipping gradients with"),
    "own-clipping": (lambda model, _: model.clip_grad_norm_(1.0), r"clip_grad_norm_\(\) with"),
    "scaler": (scaled, "a GradScaler with"),
    "closure": (lambda _, optimizer: optimizer.step(lambda: torch.zeros(())), r"step\(closure\) with"),
    "hook-of-a-step": (hooked, "register_step_pre_hook"),
    "hook-of-a-gradient": (
        lambda model, _: model.head.bias.register_post_accumulate_grad_hook(lambda _: None),
        "register_post_accumulate_grad_hook",
    ),
    "evaluation": (evaluated, "between backward.. and optimizer.step"),
    "save": (saved, "between backward.. and optimizer.step"),
    "save-of-optimizer": (optimizer_saved, "between backward.. and optimizer.step"),
    "learning-rate": (changed_rate, r"param_groups\[0\]\['lr'\] was changed"),
    "another-optimizer": (lambda model, _: ADAMW(model.parameters()).step(), "was not handed to accelerate"),
    "graph-of-gradients": (with_graph, "create_graph=True"),
    "use-outside-of-a-unit": (used_outside, "modified by an inplace operation|twice in one backward"),
}


@case([NATIVE], each=REFUSED)
def where_weights_step_in_backward_is_refused(chosen: tuple[Callable[[nn.Module, Optimizer], object], str]) -> None:
    call, said = chosen
    model, optimizer = sharded(seeded())
    with pytest.raises((EngineError, RuntimeError), match=said):
        call(model, optimizer)


@case([NATIVE])
def backward_that_raises_amid_its_steps_leaves_no_usable_model() -> None:
    model, optimizer = sharded(seeded())
    train(model, optimizer, part(X))
    path = Path(by_rank(tempfile.mkdtemp())[0], "saved")
    torchacc.checkpoint.save(path, model=model, optimizer=optimizer)
    expected = values(model)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.layers[0].register_full_backward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        backward(model, optimizer)
    hook.remove()
    with pytest.raises(EngineError, match="some of its weights had stepped already"):
        model(part(X))
    model.load_state_dict(expected)
    with pytest.raises(EngineError, match="load the optimizer's state of a checkpoint"):
        model(part(X))
    torchacc.checkpoint.load(path, model=model, optimizer=optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in values(model).items())
    optimizer.zero_grad()
    train(model, optimizer, part(X))


@case([NATIVE])
def checkpoint_of_weights_that_step_in_backward_resumes_either_way() -> None:
    model, optimizer = sharded(seeded())
    train(model, optimizer, part(X))
    path = Path(by_rank(tempfile.mkdtemp())[0], "saved")
    torchacc.checkpoint.save(path, model=model, optimizer=optimizer)
    train(model, optimizer, part(X))
    for steps in (True, False):
        other, again = sharded(seeded(), steps_in_backward=steps)
        torchacc.checkpoint.load(path, model=other, optimizer=again)
        train(other, again, part(X))
        check_same(other, model)


@case([NATIVE])
def weights_that_step_in_backward_need_an_optimizer_that_can() -> None:
    for given, said in ((None, "needs the optimizer"), (torch.optim.LBFGS, "LBFGS"), (torch.optim.Adafactor, "Adafac")):
        model = seeded()
        optimizer = None if given is None else given(model.parameters())
        with pytest.raises(torchacc.ConfigError, match=said):
            torchacc.accelerate(model, None, make_config(memory={"step_in_backward": True}), optimizer)
