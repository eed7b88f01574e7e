"""Optimizers that scripts bring: of other kinds, with a state, several, and over several models."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from casekit import (
    ADAM,
    ADAM_ABSOLUTE,
    MLP,
    MULTIPROCESS,
    NATIVE,
    SPMD,
    X,
    accelerate,
    adamw,
    case,
    check_equal,
    check_parameters,
    check_training,
    loss_of,
    part,
    sgd,
    sharded_and_plain,
    step,
)
from torch import nn

import torchacc
from tests.logged import heard
from torchacc import EngineError


class Lamb(torch.optim.Optimizer):
    """Scales each update by the norms of the whole weight and of its gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                trust = parameter.norm() / parameter.grad.norm()
                parameter.sub_(0.1 * trust * parameter.grad)


WHOLE_WEIGHT_OPTIMIZERS = {"lamb": Lamb, "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)}


@case([MULTIPROCESS], each=WHOLE_WEIGHT_OPTIMIZERS)
def optimizer_of_whole_weights_is_refused(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    model, _ = sharded_and_plain()
    optimizer = make(model.parameters())
    loss_of(model(part(X))).backward()
    with pytest.raises(torchacc.ConfigError, match="full weights"):
        optimizer.step(lambda: None)


@case([SPMD, NATIVE])
def lamb_trains() -> None:
    model, plain = sharded_and_plain()
    check_training(model, plain, lambda each: Lamb(each.parameters()), ADAM_ABSOLUTE)


FUSED_OPTIMIZERS = {
    "adamw": lambda each: torch.optim.AdamW(each.parameters(), lr=0.01, fused=True),
    "sgd": lambda each: torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9, fused=True),
}


@case([SPMD, MULTIPROCESS, NATIVE], each=FUSED_OPTIMIZERS)
def fused_optimizer_trains(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """Where there is no fused step, the optimizer takes its ordinary one, as with a checkpoint that was saved fused."""
    model, plain = sharded_and_plain()
    check_training(model, plain, make, ADAM_ABSOLUTE)


@case([SPMD])
def lbfgs_trains() -> None:
    model, plain = sharded_and_plain()
    for each, x in ((model, part(X)), (plain, X)):
        optimizer = WHOLE_WEIGHT_OPTIMIZERS["lbfgs"](each.parameters())

        def evaluate(each: nn.Module = each, x: torch.Tensor = x) -> torch.Tensor:
            each.zero_grad()
            loss = loss_of(each(x))
            loss.backward()
            return loss

        optimizer.step(evaluate)
    check_parameters(model, plain, ADAM_ABSOLUTE)


@case([NATIVE], {"tensor": lambda loss: loss, "number": lambda loss: loss.item()})
def line_search_takes_the_same_steps_on_each_device(returned: Callable[[torch.Tensor], Any]) -> None:
    model, plain = sharded_and_plain()
    for each, x in ((model, part(X)), (plain, X)):
        optimizer = torch.optim.LBFGS(each.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

        def evaluate(each: nn.Module = each, x: torch.Tensor = x) -> Any:
            each.zero_grad()
            loss = loss_of(each(x))  # of this device's rows
            loss.backward()
            return returned(loss)

        optimizer.step(evaluate)
        optimizer.step(closure=evaluate)
    check_parameters(model, plain, ADAM_ABSOLUTE)


class RememberingAdamW(torch.optim.AdamW):
    """Adds a running mean of the gradients to AdamW's own state, and a part of it to each step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        gradients = {p: p.grad for group in self.param_groups for p in group["params"]}
        super().step(closure)
        for parameter, gradient in gradients.items():
            state = self.state[parameter]
            if "mean" not in state:
                state["mean"] = torch.zeros_like(parameter)
            state["mean"].lerp_(gradient, 0.5)
            parameter.sub_(state["mean"], alpha=0.1)


@case()
def subclass_of_adamw_keeps_its_own_state() -> None:
    model, plain = sharded_and_plain()
    check_training(model, plain, lambda each: RememberingAdamW(each.parameters(), **ADAM), ADAM_ABSOLUTE)


class LateReadingAdamW(torch.optim.AdamW):
    """Reads the gradients after the step that it inherits."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=0.1)


@case()
def subclass_of_adamw_reads_gradients_after_the_inherited_step() -> None:
    model, plain = sharded_and_plain()
    adamw(plain)  # PyTorch wraps the steps of a class when it is made: now that of AdamW is wrapped by itself
    check_training(model, plain, lambda each: LateReadingAdamW(each.parameters(), **ADAM), ADAM_ABSOLUTE)


@case(each={"adamw": adamw, "sgd-momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)})
def optimizer_handed_in_with_state(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    torch.manual_seed(1)
    model, plain = MLP(), MLP()
    plain.load_state_dict(model.state_dict())
    optimizer, plain_optimizer = make(model), make(plain)
    step(model, X, optimizer)
    step(plain, X, plain_optimizer)
    accelerate(model, optimizer)
    for _ in range(2):
        step(model, part(X), optimizer)
        step(plain, X, plain_optimizer)
    check_parameters(model, plain, ADAM_ABSOLUTE)


@case()
def two_optimizers_over_halves_of_a_model() -> None:
    model, plain = sharded_and_plain()
    before = copy.deepcopy(plain.state_dict())
    for each, x in ((model, part(X)), (plain, X)):
        first, second = adamw(each.layers), sgd(each.head)
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            loss_of(each(x)).backward()
            first.step()
            second.step()
    assert not any(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())
    check_parameters(model, plain, ADAM_ABSOLUTE)


@case()
def two_models_train_against_each_other() -> None:
    generator, plain_generator = sharded_and_plain(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    critic, plain_critic = sharded_and_plain()
    for make, judge, x in ((generator, critic, part(X)), (plain_generator, plain_critic, X)):
        maker_optimizer, judge_optimizer = adamw(make), adamw(judge)
        for _ in range(2):
            judge_optimizer.zero_grad()
            (loss_of(judge(make(x).detach())) - loss_of(judge(x))).backward()
            judge_optimizer.step()
            maker_optimizer.zero_grad()
            (-loss_of(judge(make(x)))).backward()
            maker_optimizer.step()
    check_parameters(generator, plain_generator, ADAM_ABSOLUTE)
    check_parameters(critic, plain_critic, ADAM_ABSOLUTE)


@case([MULTIPROCESS])
def flattened_groups_made_after_are_refused() -> None:
    torch.manual_seed(1)
    model = MLP()
    model.head.bias.requires_grad_(False)
    accelerate(model, flatten_parameters=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decays = [parameter for parameter in trained if parameter.dim() >= 2]
    rest = [parameter for parameter in trained if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decays}, {"params": rest, "weight_decay": 0.0}], lr=1e-3)
    loss_of(model(part(X))).backward()
    with pytest.raises(torchacc.ConfigError, match="flatten_parameters"):
        optimizer.step()


def _beside(model: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 2).to(next(model.parameters()).device)


@case([NATIVE, MULTIPROCESS])
def gradients_beside_the_model_are_averaged_by_the_script_or_refused() -> None:
    model, plain = sharded_and_plain()
    head, plain_head = _beside(model), _beside(plain)
    optimizer, plain_optimizer = (
        torch.optim.SGD([*each.parameters(), *other.parameters()], lr=0.1)
        for each, other in ((model, head), (plain, plain_head))
    )
    loss_of(head(model(part(X)))).backward()
    with pytest.raises(EngineError, match="in no model of accelerate"):
        optimizer.step()
    for parameter in head.parameters():
        parameter.grad = torchacc.dist.all_gather(parameter.grad[None]).mean(0)
    optimizer.step()
    loss_of(plain_head(plain(X))).backward()
    plain_optimizer.step()
    for parameter, expected in zip(head.parameters(), plain_head.parameters(), strict=True):
        check_equal(parameter.detach().cpu(), expected.detach(), "a parameter beside the model")
    check_parameters(model, plain)


@case([NATIVE, MULTIPROCESS])
def gradients_of_an_optimizer_beside_the_models_are_warned_of() -> None:
    model, _ = sharded_and_plain()
    head = _beside(model)
    optimizer, others = adamw(model), torch.optim.SGD(head.parameters(), lr=0.1)
    with heard() as lines:
        for _ in range(2):
            loss_of(head(model(part(X)))).backward()
            optimizer.step()
            others.step()
            optimizer.zero_grad()
            others.zero_grad()
    assert sum("in no model of accelerate" in line for line in lines) == 1
