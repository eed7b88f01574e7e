"""NO_SHARD natively: a plain model in each process, whose gradients are averaged while backward goes on."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from casekit import (
    MLP,
    NATIVE,
    RANK,
    X,
    case,
    check_equal,
    check_gradients,
    check_parameters,
    check_still_trains,
    loss_of,
    part,
    sgd,
    sharded_and_plain,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchacc


def replica_and_plain(make: Callable[[], nn.Module] = MLP) -> tuple[nn.Module, nn.Module]:
    return sharded_and_plain(make, sharding_strategy="NO_SHARD")


@case([NATIVE])
def replica_keeps_its_parameters() -> None:
    model, plain = replica_and_plain()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert type(model) is MLP
    check_still_trains(model, plain)


@case([NATIVE])
def deleted_replica_is_freed() -> None:
    model, _ = replica_and_plain()
    optimizer = sgd(model)
    model.head.bias.register_post_accumulate_grad_hook(lambda p: None)
    loss_of(model(part(X))).backward()
    optimizer.step()
    held = weakref.ref(model), weakref.ref(model.head.weight)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in held] == [None, None]


@case([NATIVE])
def hooks_of_a_replica_see_means() -> None:
    """As those that step an optimizer inside of backward."""
    model, plain = replica_and_plain()
    seen: dict[bool, list[torch.Tensor]] = {}
    for each, x in ((model, part(X)), (plain, X)):
        found = seen[each is model] = []
        for parameter in each.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, found=found: found.append(p.grad.clone()))
        removed = each.head.bias.register_post_accumulate_grad_hook(lambda p: pytest.fail("it was removed"))
        removed.remove()
        loss_of(each(x)).backward()
    assert len(seen[True]) == len(seen[False]) == 6
    norms = [sorted(gradient.norm().item() for gradient in found) for found in seen.values()]
    check_equal(*map(torch.tensor, norms), "norms that hooks have seen")
    with pytest.raises(torchacc.EngineError, match="register_post_accumulate_grad_hook"):
        model.head.weight.register_hook(lambda gradient: gradient)


@case([NATIVE])
def replica_trains_what_is_unfrozen_later() -> None:
    def make() -> nn.Module:
        model = MLP()
        model.layers.requires_grad_(False)
        return model

    model, plain = replica_and_plain(make)
    for train_layers in (False, True, False, True):
        for each, x in ((model, part(X)), (plain, X)):
            each.layers.requires_grad_(train_layers)
            each.zero_grad()
            loss_of(each(x)).backward()
        check_gradients(model, plain)


class Reentrant(MLP):
    """Computes its layers again in a backward inside of backward; `shares` uses one of them outside of that, too."""

    shares = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone().requires_grad_()
        for layer in self.layers:
            y = checkpoint(layer, y, use_reentrant=True)
        return self.head(self.layers[0](y) if self.shares else y)


@case([NATIVE])
def reentrant_checkpoints_of_a_replica() -> None:
    model, plain = replica_and_plain(Reentrant)
    for shares in (False, True):
        for each, x in ((model, part(X)), (plain, X)):
            each.shares = shares
            each.zero_grad()
            loss_of(each(x)).backward()
        check_gradients(model, plain)


@case([NATIVE])
def replicas_that_differ_are_refused() -> None:
    model, plain = replica_and_plain()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(RANK)
    nn.init.normal_(model.head.weight)
    with pytest.raises(torchacc.EngineError, match=r"'head\.weight' has other values on this process"):
        loss_of(model(part(X))).backward()
    model.load_state_dict(kept)
    check_still_trains(model, plain)


@case([NATIVE])
def windows_of_a_replica_are_averaged_once() -> None:
    """Also where gradients of something else are computed in between, and where a backward inside of it has raised."""
    model, plain = replica_and_plain()
    optimizers = sgd(model), sgd(plain)
    x, whole = part(X), X
    with torchacc.accumulate(model):
        loss_of(model(x)).backward()
        own = model.head.weight.grad.clone()
    torch.autograd.grad(loss_of(model(x)), model.head.bias)
    assert torch.equal(model.head.weight.grad, own)
    with pytest.raises(torchacc.EngineError, match=r"accumulate\(\)"):
        optimizers[0].step()
    loss_of(model(x)).backward()
    for _ in range(2):
        loss_of(plain(whole)).backward()
    check_gradients(model, plain)
    for optimizer in optimizers:
        optimizer.step()
    check_parameters(model, plain)
