"""What FSDP2 by itself cannot do or dies of: graphs of gradients, losses of a part of the model, sparse gradients."""

from collections.abc import Callable

import pytest
import torch
import transformers
from casekit import (
    ALL,
    MLP,
    MULTIPROCESS,
    NATIVE,
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
    sgd,
    sharded_and_plain,
)
from torch import nn

import torchacc

STRATEGIES = {name: name for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")}


class Rectified(nn.Module):
    """Linear in pieces, so that of a penalty nothing but weights gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def penalty_of_inputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return how far the slope of each sample's output is from 1, as WGAN-GP has it."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def penalty_of_parameters(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    gradients = torch.autograd.grad(loss_of(model(x)), tuple(model.parameters()), create_graph=True)
    return sum(gradient.square().sum() for gradient in gradients)


def both(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return loss_of(model(x)) + penalty_of_inputs(model, x) + penalty_of_parameters(model, x)


def before_other_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = penalty_of_inputs(model, x)
    with torch.no_grad():
        model(x)
    return penalty + loss_of(model(2 * x))


def beside_a_state(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = penalty_of_inputs(model, x)
    model.state_dict()
    return penalty


def in_two_backwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = penalty_of_inputs(model, x)
    loss_of(model(x)).backward()
    return penalty


def check_steps(model: nn.Module, plain: nn.Module, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    optimizers = sgd(model), sgd(plain)
    for _ in range(2):
        for each, x, optimizer in zip((model, plain), (part(X), X), optimizers, strict=True):
            optimizer.zero_grad()
            loss(each, x).backward()
        check_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
    check_parameters(model, plain)


@case([NATIVE], each=STRATEGIES)
def gradient_penalties_have_the_right_gradients(strategy: str) -> None:
    for loss in (
        penalty_of_inputs,
        penalty_of_parameters,
        both,
        before_other_forwards,
        in_two_backwards,
        beside_a_state,
    ):
        model, plain = sharded_and_plain(sharding_strategy=strategy)
        check_steps(model, plain, loss)
        check_still_trains(model, plain)


@case([NATIVE])
def gradient_penalty_alone_of_a_model_that_is_linear_in_pieces() -> None:
    model, plain = sharded_and_plain(Rectified)
    check_steps(model, plain, penalty_of_inputs)


@case([NATIVE])
def gradient_penalty_with_recompute() -> None:
    """Each layer's forward is recomputed in the first backward, with whole weights."""
    model, plain = sharded_and_plain(memory={"gc": True})
    check_steps(model, plain, penalty_of_inputs)


@case([NATIVE])
def whole_weights_go_with_the_step_that_a_graph_of_gradients_was_for() -> None:
    model, _ = sharded_and_plain()
    groups = [module._get_fsdp_state()._fsdp_param_group for module in (*model.layers, model)]
    optimizer = sgd(model)
    penalty_of_inputs(model, part(X)).backward()
    assert all(group.is_unsharded for group in groups)
    optimizer.step()
    with torch.no_grad():
        model(part(X))
    assert all(group.is_sharded for group in groups)
    optimizer.zero_grad()
    loss_of(model(part(X))).backward()
    assert all(group.is_sharded for group in groups)


@case([NATIVE])
def gradients_with_a_graph_are_not_left_in_shards() -> None:
    model, plain = sharded_and_plain()
    with pytest.raises(torchacc.EngineError, match=r"backward\(create_graph=True\).*torch\.autograd\.grad\(loss"):
        loss_of(model(part(X))).backward(create_graph=True)
    check_still_trains(model, plain)


@case([NATIVE], each=STRATEGIES)
def autograd_grad_of_parameters_is_that_of_the_whole_model(strategy: str) -> None:
    """It leaves parameters' own gradients alone, also of parameters that the script uses by themselves."""
    model, plain = sharded_and_plain(sharding_strategy=strategy)
    found, expected = (
        torch.autograd.grad(
            loss_of(each(x)) + 0.1 * each.head.weight.square().sum(), [*each.parameters(), each.head.weight]
        )
        for each, x in ((model, part(X)), (plain, X))
    )
    for parameter, gradient, other in zip(model.parameters(), found, expected, strict=False):
        assert parameter.grad is None
        check_equal(plain_value(gradient), other, "gradient")
        parameter.grad = gradient
    for parameter, gradient in zip(plain.parameters(), expected, strict=False):
        parameter.grad = gradient
    check_gradients(model, plain)
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(loss_of(model.layers[0](part(X)).detach().requires_grad_()), model.head.weight)
    unused = torch.autograd.grad(loss_of(model(part(X))), [model.head.bias, model.head.weight], allow_unused=True)
    assert None not in unused
    check_still_trains(model, plain)


@case([NATIVE], each=STRATEGIES)
def backward_of_chosen_parameters(strategy: str) -> None:
    model, plain = sharded_and_plain(sharding_strategy=strategy)
    for each, x in ((model, part(X)), (plain, X)):
        loss_of(each(x)).backward(inputs=[each.head.weight, each.layers[0][0].bias])
        loss_of(each(x)).backward(inputs=each.head.weight)
    check_gradients(model, plain)
    check_still_trains(model, plain)


@case([NATIVE])
def graphs_through_a_parameter_outside_of_its_unit() -> None:
    """Are right where they go element by element, and refused elsewhere."""

    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x)) + model.head.weight.pow(4).sum()
        gradients = torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)
        return sum(gradient.square().sum() for gradient in gradients)

    model, plain = sharded_and_plain()
    check_steps(model, plain, penalty)
    loss = loss_of(model(part(X))) + (model.head.weight @ model.head.weight.t()).square().sum()
    with pytest.raises(torchacc.EngineError, match="sharded parameter that is used outside of its unit"):
        torch.autograd.grad(loss, tuple(model.parameters()), create_graph=True)


class Decayed(MLP):
    """Adds a penalty of all weights to its loss, those of its units among them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return loss_of(super().forward(x)) + 0.1 * sum(p.square().sum() for p in self.parameters())


@case([NATIVE], each=STRATEGIES)
def penalty_of_all_weights_inside_of_forward(strategy: str) -> None:
    model, plain = sharded_and_plain(Decayed, sharding_strategy=strategy)
    check_steps(model, plain, lambda each, x: each(x))


def make_mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        attn_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


PARTS = {
    "balance": lambda output: output.aux_loss,
    "last-router": lambda output: loss_of(output.router_logits[-1]),
    "last-attention": lambda output: loss_of(output.attentions[-1]),
}


@case([NATIVE], each=PARTS)
def loss_of_what_a_layer_gives_beside_its_output(loss: Callable[[object], torch.Tensor]) -> None:
    model, plain = sharded_and_plain(make_mixtral)
    ids = torch.arange(32).view(4, 8) % 13
    for each, x in ((model, part(ids)), (plain, ids)):
        loss(each(input_ids=x, output_attentions=True)).backward()
    check_gradients(model, plain)


class Sparse(nn.Module):
    """Looks rows up whose gradient is sparse."""

    def __init__(self, kind: type[nn.Module], is_trained: bool = True) -> None:
        super().__init__()
        self.rows = kind(8, 4, sparse=True).requires_grad_(is_trained)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rows((2 * x.abs()).long().clamp(max=7)).view(len(x), -1, 4).mean(1))


@case(ALL)
def sparse_gradients_are_refused() -> None:
    for kind in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(torchacc.ConfigError, match=rf"rows is an nn\.{kind.__name__} with sparse=True"):
            accelerate(Sparse(kind))


@case([NATIVE])
def frozen_rows_may_be_sparse() -> None:
    model, plain = sharded_and_plain(lambda: Sparse(nn.Embedding, is_trained=False))
    check_still_trains(model, plain)


@case([NATIVE])
def parameter_without_elements_is_refused() -> None:
    model = MLP()
    model.layers[1].nothing = nn.Parameter(torch.empty(0, 8))
    with pytest.raises(torchacc.ConfigError, match=r"'layers\.1\.nothing' has no elements"):
        accelerate(model)


@case([NATIVE])
def complex_parameter_is_refused() -> None:
    model = MLP()
    model.phases = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(torchacc.ConfigError, match=r"'phases' is of torch.complex64, which FSDP2 does not shard"):
        accelerate(model)


@case([NATIVE])
def parameter_of_whole_numbers_is_refused() -> None:
    model = MLP()
    model.count = nn.Parameter(torch.arange(4), requires_grad=False)
    with pytest.raises(
        torchacc.ConfigError, match=r"'count' is of torch.int64, and FSDP2 shards only .*register_buffer"
    ):
        accelerate(model)


if __name__ == "__main__":
    from casekit import main

    main()


class Broken(MLP):
    """Raises in backward, between two units, where it is told to."""

    breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.breaks and x.requires_grad:
            x.register_hook(self.fail)
        return self.head(self.layers[1](x))

    def fail(self, gradient: torch.Tensor) -> None:
        raise ValueError("in backward")


def by_backward(model: nn.Module, x: torch.Tensor) -> None:
    loss_of(model(x)).backward()


def by_grad(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    torch.autograd.grad(loss_of(model(x)), x)


@case((NATIVE,), each={f"{name}-{way.__name__}": (name, way) for name in STRATEGIES for way in (by_backward, by_grad)})
def optimizer_made_after_a_backward_that_raised(how: tuple[str, Callable[[nn.Module, torch.Tensor], None]]) -> None:
    strategy, way = how
    model, plain = sharded_and_plain(Broken, sharding_strategy=strategy)
    before = [id(parameter) for parameter in model.parameters()]
    model.breaks = True
    with pytest.raises(ValueError, match="in backward"):
        way(model, part(X))
    assert [id(parameter) for parameter in model.parameters()] == before
    model.breaks = False
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        loss_of(model(part(X))).backward()
        loss_of(plain(X)).backward()
        optimizer.step()
        plain_optimizer.step()
    check_parameters(model, plain)


@case((NATIVE, MULTIPROCESS))
def steps_after_a_backward_that_raised_are_refused() -> None:
    """Of some weights its gradient is there, of others it is lost, and with it what a window has kept."""
    model, plain = sharded_and_plain(Broken)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for has_window in (False, True):
        if has_window:
            with torchacc.accumulate(model):
                by_backward(model, part(X))
        model.breaks = True
        with pytest.raises(ValueError, match="in backward"):
            by_backward(model, part(X))
        model.breaks = False
        for use in (optimizer.step, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), optimizer.step):
            with pytest.raises(torchacc.EngineError, match="after a backward that has raised, with which a part"):
                use()
            by_backward(model, part(X))  # which does not bring them back
        for each, own in ((model, optimizer), (plain, plain_optimizer)):
            own.zero_grad()
            by_backward(each, part(X) if each is model else X)
            own.step()
        check_parameters(model, plain)


@case((NATIVE, MULTIPROCESS), each={"FULL_SHARD": "FULL_SHARD", "NO_SHARD": "NO_SHARD"})
def several_optimizers_drop_what_a_backward_that_raised_has_left(strategy: str) -> None:
    model, plain = sharded_and_plain(Broken, sharding_strategy=strategy)
    for each in (model, plain):
        parts = [*each.layers, each.head]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in parts]
        each.breaks = True
        with pytest.raises(ValueError, match="in backward"):
            by_backward(each, part(X) if each is model else X)
        each.breaks = False
        for _ in range(2):
            for one in optimizers:
                one.zero_grad()
            by_backward(each, part(X) if each is model else X)
            for one in optimizers:
                one.step()
    check_parameters(model, plain)


@case((NATIVE, MULTIPROCESS))
def windows_after_a_backward_that_raised_before_any_gradient() -> None:
    """What the window before it had kept is dropped with the rest."""
    model, plain = sharded_and_plain()
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    with torchacc.accumulate(model):
        by_backward(model, part(X))

    def fail(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: 1 / 0)

    handle = model.layers[1].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        by_backward(model, part(X))
    handle.remove()
    for each, own in ((model, optimizer), (plain, plain_optimizer)):
        own.zero_grad()
        by_backward(each, part(X) if each is model else X)
        own.step()
    check_parameters(model, plain)


class GivesBack(nn.Module):
    """Has a weight, and returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Idle(MLP):
    """Has a unit that is called, and whose weight nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.Sequential(GivesBack()))


@case([NATIVE])
def unit_that_returns_its_input_leaves_its_weight_without_gradient() -> None:
    model, plain = sharded_and_plain(Idle)
    for each, rows in ((model, part(X)), (plain, X)):
        by_backward(each, rows)
    check_gradients(model, plain)


class WritesToOutputs(MLP):
    """Writes to what its units return, which are views, as a linear layer's output for a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 0.5
            x.mul_(0.9)
        return self.head(x)


@case()
def outputs_of_units_may_be_written_to() -> None:
    model, plain = sharded_and_plain(WritesToOutputs)
    x = X.view(4, 2, 4).repeat(1, 1, 2)
    for _ in range(2):
        for each, rows in ((model, part(x)), (plain, x)):
            each.zero_grad()
            output = each(rows)
            output /= 2
            output.square().mean().backward()
        check_gradients(model, plain)
        sgd(model).step()
        sgd(plain).step()
    check_parameters(model, plain)


@case((NATIVE, MULTIPROCESS))
def clipping_values_in_a_window_is_refused() -> None:
    model, plain = sharded_and_plain()
    with torchacc.accumulate(model):
        loss_of(model(part(X))).backward()
        with pytest.raises(torchacc.EngineError, match=r"clipping gradients after a backward inside"):
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    loss_of(model(part(X))).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    (2 * loss_of(plain(X))).backward()
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    check_gradients(model, plain)
