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
from torchacc.engines.native import gradient_reducer


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


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.phase).abs()


@case([NATIVE])
def complex_parameters_of_a_replica() -> None:
    model, plain = replica_and_plain(Complex)
    loss_of(model(part(X))).backward()
    loss_of(plain(X)).backward()
    check_gradients(model, plain)


@case([NATIVE])
def gradients_of_a_replica_lie_like_parameters() -> None:
    """As fused optimizers go through both as they lie in memory."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 2)).to(memory_format=torch.channels_last)

    model, plain = replica_and_plain(make)
    x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    for each, own in ((model, part(x)), (plain, x)):
        loss_of(each(own)).backward()
        torch.optim.SGD(each.parameters(), lr=0.1, fused=True).step()
    check_parameters(model, plain)


class Skipping(MLP):
    """Uses its head where it is asked to, and computes a part by another method."""

    def forward(self, x: torch.Tensor, is_whole: bool = True) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.head(x) if is_whole else x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


@case([NATIVE])
def replicas_of_two_models_in_one_loss() -> None:
    """One uses all of its parameters on one process only, so that its buckets go in another order there."""
    kept = gradient_reducer.FIRST_BUCKET_BYTES, gradient_reducer.BUCKET_BYTES
    gradient_reducer.FIRST_BUCKET_BYTES = gradient_reducer.BUCKET_BYTES = 1
    try:
        pairs = [replica_and_plain(Skipping) for _ in range(2)]
        models, plains = zip(*pairs, strict=True)
        (loss_of(models[0](part(X))) + loss_of(models[1](part(X), RANK == 0))).backward()
        for rank, x in enumerate(X.chunk(2)):
            (0.5 * (loss_of(plains[0](x)) + loss_of(plains[1](x, rank == 0)))).backward()
        for model, plain in pairs:
            check_gradients(model, plain)
    finally:
        gradient_reducer.FIRST_BUCKET_BYTES, gradient_reducer.BUCKET_BYTES = kept


@case([NATIVE])
def failed_backwards_of_a_replica() -> None:
    """Their gradients cannot be used before the next one, which makes them what PyTorch's are."""
    model, plain = replica_and_plain()
    optimizer = sgd(model)
    for has_window in (False, True):
        for each, x in ((model, part(X)), (plain, X)):
            each.zero_grad()
            if has_window and each is model:
                with torchacc.accumulate(model):
                    loss_of(each(x)).backward()
            else:
                loss_of(each(x)).backward()
            handle = each.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(each(x)).backward()
            handle.remove()
        for act in (optimizer.step, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            with pytest.raises(torchacc.EngineError, match="after a backward that has raised"):
                act()
        loss_of(model(part(X))).backward()
        loss_of(plain(X)).backward()
        check_gradients(model, plain)
        optimizer.step()
        sgd(plain).step()
    check_still_trains(model, plain)


@case([NATIVE])
def windows_of_a_replica_by_other_methods() -> None:
    """No output of the model's forward tells of these backwards."""
    model, plain = replica_and_plain(Skipping)
    optimizer = sgd(model)
    with torchacc.accumulate(model):
        loss_of(model.encode(part(X))).backward()
    with pytest.raises(torchacc.EngineError, match=r"accumulate\(\)"):
        optimizer.step()
    loss_of(model.encode(part(X))).backward()
    for _ in range(2):
        loss_of(plain.encode(X)).backward()
    check_gradients(model, plain)
    optimizer.step()
    sgd(plain).step()
    check_parameters(model, plain)


@case([NATIVE])
def replicas_that_differ_in_a_row_are_refused() -> None:
    model, _ = replica_and_plain(lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8)))
    torch.manual_seed(RANK)
    with torch.no_grad():
        model[0].weight[8:].normal_()
    with pytest.raises(torchacc.EngineError, match=r"'0\.weight' has other values"):
        loss_of(model(torch.arange(10))).backward()


@case([NATIVE])
def replicas_frozen_differently_are_refused() -> None:
    model, plain = replica_and_plain()
    model.layers[RANK].requires_grad_(False)
    with pytest.raises(torchacc.EngineError, match="train other parameters than each other"):
        loss_of(model(part(X))).backward()
    model.layers.requires_grad_(True)
    check_still_trains(model, plain)


class Returning(MLP):
    """Returns a parameter as it is, beside what it computes, by a sparse lookup if asked to."""

    is_sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_sparse:
            return super().forward(x), nn.functional.embedding(x.new_zeros(1).long(), self.table, sparse=True)
        return super().forward(x), self.table


@case([NATIVE])
def replica_returns_a_parameter() -> None:
    model, plain = replica_and_plain(Returning)
    for each, x in ((model, part(X)), (plain, X)):
        output, table = each(x)
        loss_of(output * table).backward()
    check_gradients(model, plain)
    model.is_sparse = True
    model.zero_grad()
    output, table = model(part(X))
    with pytest.raises(torchacc.EngineError, match="'table' has got a sparse gradient"):
        loss_of(output * table).backward()
