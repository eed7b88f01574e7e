"""What a script reads of a sharded model outside of its forward: the unsharded numbers, or an error of ours."""

import copy
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from casekit import (
    MULTIPROCESS,
    NATIVE,
    RANK,
    XLA,
    X,
    by_rank,
    case,
    check_equal,
    check_gradients,
    check_parameters,
    check_training,
    loss_of,
    part,
    plain_value,
    sgd,
    sharded_and_plain,
)
from torch import nn
from torch.nn import functional as F

import torchacc
from torchacc.engines import process_group


class Scaled(nn.Module):
    """A layer of rows that do not go evenly into two shards, a scale that a script multiplies with, and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.tensor([0.7]))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.linear(x, layer[0].weight, layer[0].bias).tanh()
        return F.linear(x, self.head.weight, self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


LOSSES = {
    "scale": lambda model, x: loss_of(model(x) * model.scale.exp()),
    "squares": lambda model, x: loss_of(model(x)) + 0.1 * sum(p.square().sum() for p in model.parameters()),
    "norms": lambda model, x: loss_of(model(x)) + 0.1 * sum(p.norm() for p in model.parameters()),
    "largest": lambda model, x: loss_of(model(x)) + 0.1 * sum(p.abs().max() for p in model.parameters()),
    "flat": lambda model, x: loss_of(model(x)) + torch.cat([p.view(-1) for p in model.parameters()]).pow(2).mean(),
    "tied": lambda model, x: loss_of(F.linear(model(x), model.head.weight.t())),
    "method": lambda model, x: loss_of(model.encode(x)) + 0.0 * model(x).sum(),
    "child": lambda model, x: loss_of(model.head(model.layers[0](x))),
    "embedding": lambda model, x: (
        loss_of(model(x)) + F.embedding(torch.tensor([0, 4]).to(x.device), model.head.weight).square().sum()
    ),
}


@case(XLA, each=LOSSES)
def script_computes_with_a_parameter(loss) -> None:
    model, plain = sharded_and_plain(Scaled)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        loss(model, part(X)).backward()
        loss(plain, X).backward()
        check_gradients(model, plain)
        optimizer.step()
        plain_optimizer.step()
    check_parameters(model, plain)


READ = {
    "norm": lambda p: p.norm(),
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean(),
    "deviation": lambda p: p.std(correction=0),
    "max": lambda p: p.max(),
    "exp": lambda p: p.exp().mean(),
    "argmin": lambda p: p.argmin(),
    "row": lambda p: p[0],
    "last": lambda p: p[-1],
    "matrix norm": lambda p: p.flatten(1).norm(dim=1) if p.dim() > 1 else p,
    "shape": lambda p: torch.tensor([*p.shape, p.numel(), len(p), p.dim(), p.size(0)]),
    "cpu": lambda p: p.cpu(),
    "clone": lambda p: p.clone(),
    "finite": lambda p: torch.isfinite(p).all(),
    "list": lambda p: torch.tensor(p.tolist()),
    "foreach": lambda p: torch.stack(torch._foreach_norm([p, p])),
    "foreach squares": lambda p: torch._foreach_mul([p, p], 2)[1].sum(),
    "cosine": lambda p: F.cosine_similarity(p.flatten(), (p * 2 + 1).flatten(), dim=0),
}


@case([MULTIPROCESS], each=READ)
def values_read_are_the_unsharded_ones(read) -> None:
    model, plain = sharded_and_plain(Scaled)
    loss_of(model(part(X))).backward()
    loss_of(plain(X)).backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            check_equal(plain_value(read(parameter)), plain_value(read(expected[name])), name)
        check_equal(plain_value(read(parameter)), plain_value(read(expected[name])), name)
        check_equal(plain_value(read(parameter.data)), plain_value(read(expected[name].data)), name)
        if parameter.grad is not None:
            check_equal(
                plain_value(read(parameter.grad)), plain_value(read(expected[name].grad)), f"gradient of {name}"
            )


def edit_scale(model):
    for p in model.parameters():
        p.data.mul_(0.5)


def edit_detached(model):
    for p in model.parameters():
        p.detach().add_(0.1)


def edit_copied(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).view(p.shape).to(p.device, p.dtype) / 500)


def edit_data(model):
    for p in model.parameters():
        p.data = p.data * 0.5 + 0.01


def edit_filled(model):
    with torch.no_grad():
        for p in model.parameters():
            p[...] = 0.25
            p += 0.1


def edit_mask(model):
    with torch.no_grad():
        for p in model.parameters():
            p[p < 0] = 0.05
            p.masked_fill_(p > 0.2, 0.2)


def edit_row_wise(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.linspace(0.5, 1, len(p)).view(-1, *[1] * (p.dim() - 1)).to(p.device))


def edit_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def edit_constant(model):
    nn.init.constant_(model.head.weight, 0.3)
    nn.init.zeros_(model.head.bias)


def edit_foreach(model):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


def edit_unsharded_average(model):
    average = [p.clone().detach() for p in model.parameters()]
    for a, p in zip(average, model.parameters(), strict=True):
        a.mul_(0.9).add_(p.data, alpha=0.2)
        p.data.copy_(a)


def edit_sharded_average(model):
    average = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for a, p in zip(average, model.parameters(), strict=True):
            a.lerp_(p * 2, 0.5)
            p.copy_(a)
    copy.deepcopy(average)


EDITS = {name.removeprefix("edit_"): value for name, value in list(globals().items()) if name.startswith("edit_")}


# Under SPMD `data` cannot be given a tensor that lies otherwise.
@case([MULTIPROCESS], each={"vector": EDITS.pop("vector")})
def parameters_given_a_vector(edit) -> None:
    parameters_edited_in_place(edit)


@case(XLA, each=EDITS)
def parameters_edited_in_place(edit) -> None:
    model, plain = sharded_and_plain(Scaled)
    edit(model)
    edit(plain)
    check_parameters(model, plain)
    check_training(model, plain)


REFUSED = {
    "random": lambda model: nn.init.xavier_uniform_(model.head.weight),
    "normal": lambda model: model.head.weight.data.normal_(),
    "noise": lambda model: model.head.weight.data.add_(torch.randn_like(model.head.weight)),
    "row": lambda model: model.head.weight.data[0].zero_(),
    "item": lambda model: model.head.weight.data.__setitem__(0, 1.0),
    "view": lambda model: model.head.weight.data.view(-1).mul_(2),
    "transposed": lambda model: model.head.weight.detach().t().add_(1),
    "shape": lambda model: model.head.weight.data.copy_(torch.zeros(3, 8)),
    "data": lambda model: setattr(model.head.weight, "data", torch.zeros(3, 8).to(model.head.weight.device)),
    "sort": lambda model: model.head.weight.data.cumsum_(0),
    "pickle": lambda model: torch.save(model.head.weight, "/dev/null"),
    "hook": lambda model: model.head.weight.register_hook(lambda gradient: gradient * 2),
    "copy": lambda model: model.head.weight.detach().requires_grad_().sum(),
    "other rank": lambda model: (model.head.weight if RANK else model.scale).norm(),
}


@case([MULTIPROCESS], each=REFUSED)
def what_cannot_be_right_raises_on_each_rank(act) -> None:
    model, plain = sharded_and_plain(Scaled)
    with pytest.raises(torchacc.EngineError) as raised:
        act(model)
    assert all(by_rank(str(raised.value)))
    check_parameters(model, plain)
    check_training(model, plain)


@case([MULTIPROCESS])
def padding_is_never_counted() -> None:
    model, plain = sharded_and_plain(Scaled)
    loss_of(model(part(X))).backward()
    loss_of(plain(X)).backward()
    for mine in (model, plain):
        for p in mine.parameters():
            if p.grad is not None:
                p.grad.add_(1.0)
    found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    check_equal(found.cpu(), expected, "norm of gradients that a script has changed")
    check_gradients(model, plain)
    total = sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None).sqrt()
    check_equal(
        total.cpu(), sum(p.grad.norm() ** 2 for p in plain.parameters() if p.grad is not None).sqrt(), "by hand"
    )


@case([MULTIPROCESS])
def rank_that_reads_alone_does_not_wait_for_long() -> None:
    model, plain = sharded_and_plain(Scaled)
    soon = torch.distributed.new_group(timeout=timedelta(seconds=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_meetings", lambda: soon)
        if RANK == 0:
            with pytest.raises(torchacc.EngineError, match=r"'head\.weight'.* others did not .*full_state_dict"):
                model.head.weight.norm()
        by_rank(None)
    check_training(model, plain)


class Extra(nn.Module):
    """A layer with parameters that the model uses before the layer does, or instead of it, or nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.first, self.shared, self.unused = (nn.Parameter(torch.randn(8)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.shared


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Extra(), Extra()])
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.layers[1].first * self.layers[1].shared
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@case([NATIVE], each={"full": "FULL_SHARD", "grad-op": "SHARD_GRAD_OP", "none": "NO_SHARD"})
def gradients_that_come_to_parameters_outside_of_their_unit(strategy: str) -> None:
    model, plain = sharded_and_plain(Borrowing, sharding_strategy=strategy)
    for times in (1, 3):
        for each, x in ((model, part(X)), (plain, X)):
            each.zero_grad()
            for last in range(times):
                is_held = each is model and last < times - 1
                with torchacc.accumulate(model) if is_held else nullcontext():
                    penalty = each.layers[0].first.square().sum()  # before the forward, so that its gradient comes last
                    (loss_of(each(x)) + penalty).backward()
        check_gradients(model, plain)
    assert model.layers[0].unused.grad is None


@case([NATIVE], each={"default": None, "one-by-one": False})
def clipping_of_shards_beside_ordinary_parameters(foreach: bool | None) -> None:
    model, plain = sharded_and_plain(sharding_strategy="FULL_SHARD")
    norms = []
    for each, x in ((model, part(X)), (plain, X)):
        other = nn.Linear(8, 8)
        loss_of(each(x)).backward()
        for parameter in other.parameters():
            parameter.grad = torch.ones_like(parameter)
        both = [*each.parameters(), *other.parameters()]
        norms.append(plain_value(nn.utils.clip_grad_norm_(both, 0.1, foreach=foreach)))
        norms.append(other.weight.grad)
    check_equal(norms[0], norms[2], "norm")
    check_equal(norms[1], norms[3], "gradient")
    check_gradients(model, plain)
