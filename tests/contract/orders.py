"""Orders of calls other than step after step, as scripts: `order_cases.py` runs each sharded and plain."""

import tempfile
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from casekit import (
    ALL,
    MLP,
    NATIVE,
    SPMD,
    plain_value,
)
from torch import nn

import torchacc


class Scored(MLP):
    """Returns its loss, which is the mean over all devices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class Script:
    """A model beside its batch, and what a script has seen of them."""

    def __init__(self, model: nn.Module, x: torch.Tensor, *, is_sharded: bool) -> None:
        self.model, self.x, self.is_sharded = model, x, is_sharded
        self.seen: list[torch.Tensor] = []

    def note(self, value: torch.Tensor) -> None:
        self.seen.append(plain_value(value))

    @torch.no_grad()
    def evaluate(self) -> None:
        self.note(self.model(self.x))

    def backward(self) -> None:
        self.model(self.x).backward()

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)

    def train(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.backward()
        optimizer.step()

    def clip(self) -> None:
        self.note(nn.utils.clip_grad_norm_(self.model.parameters(), 0.05))

    def accumulate(self) -> Any:
        return torchacc.accumulate(self.model) if self.is_sharded else nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        """Return a full state of other values."""
        own = torchacc.full_state_dict(self.model) if self.is_sharded else self.model.state_dict()
        return {name: value.detach().clone() * 0.5 + 0.1 for name, value in own.items()}


Order = Callable[[Script], None]
ORDERS: dict[str, tuple[Order, Collection[str]]] = {}


def order(engines: Collection[str] = ALL) -> Callable[[Order], Order]:
    def register(function: Order) -> Order:
        ORDERS[function.__name__] = function, engines
        return function

    return register


@order()
def optimizer_made_after_evaluation(script: Script) -> None:
    script.evaluate()
    optimizer = script.optimizer()
    script.train(optimizer)
    script.train(optimizer)
    script.evaluate()


@order()
def optimizer_made_between_forward_and_backward(script: Script) -> None:
    loss = script.model(script.x)
    optimizer = script.optimizer()
    loss.backward()
    optimizer.step()
    script.train(optimizer)


@order()
def evaluation_between_backward_and_clipping(script: Script) -> None:
    optimizer = script.optimizer()
    for _ in range(2):
        script.backward()
        script.evaluate()
        script.clip()
        script.evaluate()
        optimizer.step()
        script.evaluate()
        optimizer.zero_grad()


@order()
def evaluation_between_forward_and_backward(script: Script) -> None:
    optimizer = script.optimizer()
    for _ in range(2):
        loss = script.model(script.x)
        script.evaluate()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@order()
def forward_that_no_backward_follows(script: Script) -> None:
    optimizer = script.optimizer()
    script.backward()
    script.model(script.x)
    script.clip()
    optimizer.step()
    script.model(script.x)
    optimizer.zero_grad()
    script.train(optimizer)
    script.evaluate()


@order()
def gradients_cleared_after_evaluation(script: Script) -> None:
    optimizer = script.optimizer()

    def by_hand() -> None:
        for parameter in script.model.parameters():
            parameter.grad = None

    def in_place() -> None:
        for parameter in script.model.parameters():
            parameter.grad.zero_()

    for clear in (
        script.model.zero_grad,
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        by_hand,
        in_place,
    ):
        script.backward()
        script.evaluate()
        clear()
        script.train(optimizer)
        script.evaluate()


@order()
def gradients_edited_after_evaluation(script: Script) -> None:
    optimizer = script.optimizer()
    script.backward()
    script.evaluate()
    for parameter in script.model.parameters():
        parameter.grad.mul_(0.5)
        parameter.grad = parameter.grad * 3
    script.clip()
    optimizer.step()


@order()
def frozen_after_evaluation(script: Script) -> None:
    optimizer = script.optimizer()
    script.evaluate()
    script.model.layers[0].requires_grad_(False)
    script.model.head.weight.requires_grad_(False)
    script.train(optimizer)
    script.evaluate()
    script.model.requires_grad_(True)
    script.train(optimizer)


@order()
def frozen_between_forward_and_backward(script: Script) -> None:
    optimizer = script.optimizer()
    loss = script.model(script.x)
    script.model.head.bias.requires_grad_(False)
    script.model.layers[1].requires_grad_(False)
    loss.backward()
    script.clip()
    optimizer.step()
    script.model.requires_grad_(True)
    script.train(optimizer)


@order()
def all_frozen_at_first(script: Script) -> None:
    script.model.requires_grad_(False)
    script.evaluate()
    script.note(script.model(script.x))
    script.model.requires_grad_(True)
    optimizer = script.optimizer()
    script.train(optimizer)
    script.evaluate()


@order()
def edited_after_evaluation(script: Script) -> None:
    optimizer = script.optimizer()
    script.evaluate()
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.mul_(0.5).add_(0.01)
    script.evaluate()
    for parameter in script.model.parameters():
        parameter.data.mul_(1.5)
    script.evaluate()
    script.train(optimizer)


@order()
def edited_between_forward_and_next_forward(script: Script) -> None:
    optimizer = script.optimizer()
    script.model(script.x)
    with torch.no_grad():
        for parameter in script.model.parameters():
            parameter.add_(0.1)
    script.note(script.model(script.x))
    script.train(optimizer)


@order([NATIVE, SPMD])  # on a CPU, the other keeps the weights that forward had
def edited_between_forward_and_backward(script: Script) -> None:
    optimizer = script.optimizer()
    loss = script.model(script.x)
    with torch.no_grad():
        script.model.layers[1][0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    script.train(optimizer)
    script.evaluate()


@order()
def bias_edited_between_forward_and_backward(script: Script) -> None:
    """Nothing of a bias is saved for backward."""
    optimizer = script.optimizer()
    loss = script.model(script.x)
    with torch.no_grad():
        script.model.head.bias.add_(1.0)
        script.model.layers[0][0].bias.add_(1.0)
    loss.backward()
    optimizer.step()
    script.evaluate()


@order([NATIVE])
def data_edited_between_forward_and_backward(script: Script) -> None:
    optimizer = script.optimizer()
    loss = script.model(script.x)
    for parameter in script.model.parameters():
        parameter.data.mul_(1.5)
    loss.backward()
    optimizer.step()
    script.evaluate()


@order([NATIVE, SPMD])  # on a CPU, the other keeps the weights that forward had
def stepped_between_two_backwards(script: Script) -> None:
    optimizer = script.optimizer()
    first, second = script.model(script.x), script.model(script.x * 2)
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    script.train(optimizer)


@order()
def averaged_beside_training(script: Script) -> None:
    optimizer = script.optimizer()
    script.evaluate()
    average = [parameter.detach().clone() for parameter in script.model.parameters()]
    for _ in range(2):
        script.train(optimizer)
        script.evaluate()
        with torch.no_grad():
            for mean, parameter in zip(average, script.model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
    kept = [parameter.detach().clone() for parameter in script.model.parameters()]
    with torch.no_grad():
        for mean, parameter in zip(average, script.model.parameters(), strict=True):
            parameter.copy_(mean)
    script.evaluate()
    with torch.no_grad():
        for own, parameter in zip(kept, script.model.parameters(), strict=True):
            parameter.copy_(own)
    script.train(optimizer)
    script.evaluate()


@order()
def state_loaded_around_evaluation(script: Script) -> None:
    optimizer = script.optimizer()
    script.evaluate()
    script.model.load_state_dict(script.state())
    script.evaluate()
    script.train(optimizer)
    script.model(script.x)
    script.model.load_state_dict(script.state())
    script.evaluate()
    script.train(optimizer)


@order()
def own_state_loaded_after_training(script: Script) -> None:
    """As for the best epoch: `state_dict()` shares memory with the model, in plain PyTorch too."""
    optimizer = script.optimizer()
    script.evaluate()
    best = {name: value.clone() for name, value in script.model.state_dict().items()}
    script.train(optimizer)
    script.evaluate()
    script.model.load_state_dict(best)
    script.evaluate()


@order()
def checkpoint_loaded_after_evaluation(script: Script) -> None:
    optimizer = script.optimizer()
    script.train(optimizer)
    if script.is_sharded:
        folder = torchacc.dist.rendezvous("folder", tempfile.mkdtemp().encode())[0].decode() + "/saved"
        torchacc.checkpoint.save(folder, model=script.model, optimizer=optimizer)
    else:
        saved = {name: value.clone() for name, value in script.model.state_dict().items()}
    script.evaluate()
    script.train(optimizer)
    script.evaluate()
    script.model(script.x)
    optimizer = script.optimizer()
    if script.is_sharded:
        torchacc.checkpoint.load(folder, model=script.model)
    else:
        script.model.load_state_dict(saved)
    script.evaluate()
    script.train(optimizer)
    script.evaluate()


@order()
def two_forwards_before_one_backward(script: Script) -> None:
    optimizer = script.optimizer()
    for _ in range(2):
        optimizer.zero_grad()
        (script.model(script.x) + script.model(script.x * 0.5)).backward()
        script.clip()
        optimizer.step()


@order()
def two_forwards_before_two_backwards(script: Script) -> None:
    optimizer = script.optimizer()
    for _ in range(2):
        optimizer.zero_grad()
        first, second = script.model(script.x), script.model(script.x * 0.5)
        first.backward()
        script.evaluate()
        second.backward()
        optimizer.step()


@order()
def backward_twice(script: Script) -> None:
    optimizer = script.optimizer()
    loss = script.model(script.x)
    loss.backward(retain_graph=True)
    loss.backward()
    script.clip()
    optimizer.step()
    script.evaluate()


@order()
def evaluation_inside_of_a_window(script: Script) -> None:
    optimizer = script.optimizer()
    for _ in range(2):
        with script.accumulate():
            script.backward()
            script.evaluate()
        script.evaluate()
        script.backward()
        script.evaluate()
        script.clip()
        optimizer.step()
        optimizer.zero_grad()


@order()
def window_given_up(script: Script) -> None:
    optimizer = script.optimizer()
    with script.accumulate():
        script.backward()
    script.evaluate()
    optimizer.zero_grad()
    script.train(optimizer)
    script.evaluate()


@order()
def trained_on_after_a_forward_that_raised(script: Script) -> None:
    optimizer = script.optimizer()
    script.train(optimizer)
    for context in (nullcontext, torch.no_grad):
        with context(), pytest.raises(RuntimeError):
            script.model(script.x[:, :5])
        script.train(optimizer)
        script.evaluate()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@order()
def trained_on_after_a_forward_that_was_interrupted(script: Script) -> None:
    optimizer = script.optimizer()
    handle = script.model.layers[1].register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        script.model(script.x)
    handle.remove()
    script.train(optimizer)
    script.evaluate()


@order()
def trained_on_after_a_backward_that_raised(script: Script) -> None:
    optimizer = script.optimizer()
    script.train(optimizer)
    layer = script.model.layers[0]
    handle = layer.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        script.backward()
    handle.remove()
    script.train(optimizer)
    script.evaluate()


@order()
def mode_changed_everywhere(script: Script) -> None:
    optimizer = script.optimizer()
    script.model.eval()
    script.evaluate()
    script.train(optimizer)
    script.model.train()
    script.evaluate()
    with torch.inference_mode():
        script.note(script.model(script.x).clone())
    script.train(optimizer)
    script.evaluate()


@order()
def group_added_after_evaluation(script: Script) -> None:
    script.evaluate()
    optimizer = torch.optim.SGD(script.model.layers.parameters(), lr=0.5)
    script.train(optimizer)
    script.evaluate()
    optimizer.add_param_group({"params": list(script.model.head.parameters()), "lr": 0.1})
    script.model.zero_grad()
    script.train(optimizer)
