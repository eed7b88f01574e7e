"""Losses that compare a sample with those of all devices, by `torchacc.dist.all_gather()`."""

import pytest
import torch
import transformers
from casekit import (
    ENGINE,
    MULTIPROCESS,
    NATIVE,
    RANK,
    SPMD,
    X,
    adamw,
    by_rank,
    case,
    check_equal,
    check_gradients,
    check_parameters,
    loss_of,
    part,
    sgd,
    sharded_and_plain,
)
from torch import nn
from torch.nn import functional as F

import torchacc
from tests.logged import heard

Y = torch.randn(4, 8, generator=torch.Generator().manual_seed(8))
"""What each row of `X` belongs to."""


class Towers(nn.Module):
    """Two encoders, and a scale that is learned with them."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
        self.texts = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.images(x), dim=-1), F.normalize(self.texts(y), dim=-1)


class Clip(Towers):
    """Computes its loss by itself."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = super().forward(x, y)
        x, y = torchacc.dist.all_gather(x), torchacc.dist.all_gather(y)
        return contrast(x, y, self.scale.exp())


def contrast(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    similar = x @ y.T * scale
    target = torch.arange(len(similar)).to(similar.device)
    return (F.cross_entropy(similar, target) + F.cross_entropy(similar.T, target)) / 2


def of_all_by_script(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x, y = map(torchacc.dist.all_gather, model(x, y))
    return contrast(x, y, model.scale.exp())


def plain_loss(model: nn.Module) -> torch.Tensor:
    x, y = Towers.forward(model, X, Y)
    return contrast(x, y, model.scale.exp())


def rows_of_own(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each process has the loss of its own rows against all, as open_clip's `local_loss`."""
    x, y = model(x, y)
    all_x, all_y = torchacc.dist.all_gather(x), torchacc.dist.all_gather(y)
    first = len(x) * RANK if len(all_x) > len(x) else 0
    target = torch.arange(first, first + len(x)).to(x.device)
    scale = model.scale.exp()
    return (F.cross_entropy(x @ all_y.T * scale, target) + F.cross_entropy(y @ all_x.T * scale, target)) / 2


def of_model(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x, y)


WAYS = {"script": (Towers, of_all_by_script), "rows": (Towers, rows_of_own), "model": (Clip, of_model)}
# Natively a parameter of a model is not to be read outside of its forward.
SCRIPTS_WITH_A_SCALE = (MULTIPROCESS, SPMD)


def check_contrastive(make, loss, **options) -> None:
    model, plain = sharded_and_plain(make, **options)
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    for _ in range(2):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        found, expected = loss(model, part(X), part(Y)), plain_loss(plain)
        found.backward()
        expected.backward()
        check_gradients(model, plain)
        if loss is not rows_of_own:
            check_equal(found.detach().cpu(), expected.detach(), "loss")
        optimizer.step()
        plain_optimizer.step()
    check_parameters(model, plain, 5e-6)


@case()
def contrastive_loss_inside_of_the_model() -> None:
    check_contrastive(Clip, of_model)


@case()
def contrastive_loss_with_replicas() -> None:
    check_contrastive(Clip, of_model, sharding_strategy="NO_SHARD")


@case(SCRIPTS_WITH_A_SCALE, each=WAYS)
def contrastive_loss_of_a_script(way) -> None:
    check_contrastive(*way)


@case()
def contrastive_loss_of_a_script_with_a_scale_from_the_model() -> None:
    class ScaleToo(Towers):
        def forward(self, x, y):
            return *super().forward(x, y), self.scale.exp()

    def loss(model, x, y):
        x, y, scale = model(x, y)
        return contrast(torchacc.dist.all_gather(x), torchacc.dist.all_gather(y), scale)

    check_contrastive(ScaleToo, loss)


@case()
def rows_come_in_the_order_of_the_global_batch() -> None:
    sharded_and_plain()
    for rows in (X, X > 0, X.long(), X.double(), X.bfloat16(), X[:, 0], X[:, :0]):
        check_equal(torchacc.dist.all_gather(part(rows)).cpu(), rows, str(rows.dtype))
        if ENGINE != SPMD:
            check_equal(torchacc.dist.all_gather(rows.chunk(2)[RANK]), rows, f"{rows.dtype} of the host")


@case()
def gathered_under_no_grad() -> None:
    model, plain = sharded_and_plain()
    with torch.no_grad():
        found = torchacc.dist.all_gather(model(part(X)))
    assert not found.requires_grad
    check_equal(found.cpu(), plain(X).detach(), "output")


@case()
def gathered_rows_in_a_window() -> None:
    model, plain = sharded_and_plain()
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    with torchacc.accumulate(model):
        loss_of(torchacc.dist.all_gather(model(part(X)))).backward()
    loss_of(torchacc.dist.all_gather(model(part(Y)))).backward()
    (loss_of(plain(X)) + loss_of(plain(Y))).backward()
    check_gradients(model, plain)
    optimizer.step()
    plain_optimizer.step()
    check_parameters(model, plain)


@case()
def tensor_without_rows_is_refused() -> None:
    with pytest.raises(torchacc.DataError, match="without dimensions"):
        torchacc.dist.all_gather(torch.tensor(1.0))


UNLIKE = {
    "rows": lambda: torch.zeros(2 + RANK, 3),
    "columns": lambda: torch.zeros(2, 3 + RANK),
    "dims": lambda: torch.zeros(2, *[3] * RANK),
    "dtype": lambda: torch.zeros(2, dtype=(torch.float32, torch.float64)[RANK]),
    "gradient": lambda: torch.zeros(2, requires_grad=RANK == 0),
}


@case([NATIVE, MULTIPROCESS], each=UNLIKE)
def tensors_that_differ_are_refused_on_each_rank(make) -> None:
    sharded_and_plain()
    with pytest.raises(torchacc.DataError, match="rank 0 .*rank 1"):
        torchacc.dist.all_gather(make())
    assert by_rank(1) == [1, 1]


def make_experts() -> nn.Module:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.MixtralConfig(
        **sizes,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


TOKENS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(TOKENS)
MASK[0, 4:] = MASK[3, 3:] = 0
BATCHES = {
    "whole": {"input_ids": TOKENS, "labels": TOKENS},
    "masked": {"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS},
}


@case([NATIVE, MULTIPROCESS], each=BATCHES)
def experts_are_balanced_over_the_tokens_of_all_devices(batch) -> None:
    model, plain = sharded_and_plain(make_experts)
    found = model(**{name: part(value) for name, value in batch.items()})
    expected = plain(**batch)
    found.loss.backward()
    expected.loss.backward()
    check_gradients(model, plain)
    check_equal(found.aux_loss.detach().cpu(), expected.aux_loss.detach(), "auxiliary loss")
    check_equal(found.loss.detach().cpu(), expected.loss.detach(), "loss")


@case([NATIVE])  # XLA's batches have the same length on every rank
def experts_are_balanced_over_rows_of_different_lengths() -> None:
    model, plain = sharded_and_plain(make_experts)
    own = {"input_ids": TOKENS[2 * RANK : 2 * RANK + 2, : (6, 4)[RANK]]}
    mask = torch.ones_like(TOKENS)
    mask[2:, 4:] = 0
    found, expected = model(**own), plain(input_ids=TOKENS, attention_mask=mask)
    check_equal(found.aux_loss.detach(), expected.aux_loss.detach(), "auxiliary loss")
    (found.aux_loss + 0 * found.logits.sum()).backward()
    (expected.aux_loss + 0 * expected.logits.sum()).backward()
    check_gradients(model, plain)


class Summed(nn.Module):
    """Returns a sum over samples, times what it is told."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(self.layer(x), x[:, :4], reduction="sum")
        return loss if self.factor == 1 else self.factor * loss


@case([NATIVE, MULTIPROCESS])
def sum_over_samples_is_warned_of_once() -> None:
    with heard() as seen:
        model, _ = sharded_and_plain(Summed)
        for _ in range(2):
            model(part(X)).backward()
        told = [message for message in seen if "is a sum over samples" in message]
        assert len(told) == 1
        assert "multiply the sum by 2" in told[0]
        sharded, plain = sharded_and_plain(lambda: Summed(factor=2))
        sharded(part(X)).backward()
        (plain(X) / 2).backward()
        check_gradients(sharded, plain)
        assert len([message for message in seen if "is a sum over samples" in message]) == 1
