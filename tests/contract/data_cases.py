"""Batches that no loader of ours has given, and rows with different numbers of labels, on two devices."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from casekit import (
    ENGINE,
    MLP,
    MULTIPROCESS,
    NATIVE,
    RANK,
    SPMD,
    X,
    accelerate,
    case,
    check_equal,
    check_parameters,
    loss_of,
    part,
    sgd,
    sharded_and_plain,
    step,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torchacc
from tests.logged import heard
from torchacc.engines.device_losses import weighed

SAME = "with the same inputs, and no loader of torchacc has given them"
UNEVEN = "the labels of a batch that are not -100 are"
PAGE = Path(__file__).parents[2] / "docs" / "script.md"


def count(lines: list[str], text: str) -> int:
    return sum(text in line for line in lines)


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    """Return this process's rows of a global batch, on the CPU."""
    return whole if ENGINE == SPMD else whole.chunk(2)[RANK]


@case()
def forgotten_loader_is_warned_of_once() -> None:
    model = accelerate(MLP())
    optimizer = sgd(model)
    with heard() as lines:
        for _ in range(4):
            step(model, X, optimizer)
    assert count(lines, SAME) == (ENGINE != SPMD), lines


@case()
def forgotten_loader_is_found_after_another_loader_was_read() -> None:
    model = accelerate(MLP())
    optimizer = sgd(model)
    with heard() as lines:
        for x in torchacc.shard_loader(DataLoader(X, 1), model):
            step(model, x, optimizer)
            break
        step(model, X, optimizer)
        step(model, X, optimizer)
    assert count(lines, SAME) == (ENGINE != SPMD), lines


@case()
def batches_on_the_cpu_that_the_script_deals_out_train_as_one_device() -> None:
    model, plain = sharded_and_plain()
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    with heard() as lines:
        for _ in range(3):
            step(model, own_rows(X), optimizer)
            step(plain, X, plain_optimizer)
    check_parameters(model, plain)
    assert count(lines, SAME) == 0
    assert count(lines, "was called with tensors on the CPU") == (ENGINE != NATIVE and RANK == 0)


@case([NATIVE, MULTIPROCESS])
def noise_that_is_alike_beside_a_loader_of_ours_says_nothing() -> None:
    model = accelerate(MLP())
    optimizer = sgd(model)
    with heard() as lines:
        for x in torchacc.shard_loader(DataLoader(torch.arange(128.0).view(16, 8), 2), model):
            for inputs in (x, torch.ones(2, 8), torch.zeros(2, 8)):
                loss_of(model(inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_of(model(torch.ones(2, 8))).backward()  # for the next step
    assert count(lines, SAME) == 0, lines


@case()
def batches_of_our_loader_that_are_alike_say_nothing() -> None:
    model = accelerate(MLP())
    optimizer = sgd(model)
    loader = torchacc.shard_loader(DataLoader(torch.ones(16, 8), 2), model)
    with heard() as lines:
        for x in loader:
            step(model, x, optimizer)
    assert count(lines, SAME) == 0, lines


@case([NATIVE, MULTIPROCESS])
def second_model_on_rows_of_the_first_ones_loader_says_nothing() -> None:
    model, second = accelerate(MLP()), accelerate(MLP())
    optimizers = sgd(model), sgd(second)
    with heard() as lines:
        for x in torchacc.shard_loader(DataLoader(torch.ones(8, 8), 2), model):
            step(model, x, optimizers[0])
            step(second, x, optimizers[1])
    assert count(lines, SAME) == 0, lines


@case([NATIVE, MULTIPROCESS])
def inputs_that_are_alike_beside_rows_of_the_scripts_own_say_nothing() -> None:
    """As the boundary points of a physical model."""
    model = accelerate(MLP())
    optimizer = sgd(model)
    with heard() as lines:
        for _ in range(2):
            optimizer.zero_grad()
            (loss_of(model(own_rows(X))) + loss_of(model(torch.zeros(2, 8)))).backward()
            optimizer.step()
    assert count(lines, SAME) == 0, lines


@dataclass
class Output:
    loss: torch.Tensor


class Tokens(nn.Module):
    """Predicts the next token, with the loss of transformers' causal language models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
    ) -> Output:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x).tanh()
        logits, labels = self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if num_items_in_batch is None:
            return Output(F.cross_entropy(logits, labels))
        return Output(F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch)


def rows_of_tokens() -> list[dict[str, torch.Tensor]]:
    """Return 16 rows, each with another number of labels."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 11, (9,), generator=generator) for _ in range(16)]
    lengths = [2 + (5 * i) % 7 for i in range(16)]
    return [
        {"input_ids": row, "labels": row.where(torch.arange(9) < length, -100)}
        for row, length in zip(rows, lengths, strict=True)
    ]


def heard_of_epoch(model: nn.Module) -> list[str]:
    """Train for an epoch of rows with labels of different numbers, and return what is logged."""
    optimizer = sgd(model)
    with heard() as lines:
        for batch in torchacc.shard_loader(DataLoader(rows_of_tokens(), 2), model):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return lines


@case()
def labels_of_different_numbers_are_warned_of_once() -> None:
    lines = heard_of_epoch(accelerate(Tokens()))
    assert count(lines, UNEVEN) == (ENGINE != SPMD), lines
    assert count(lines, SAME) == 0


@case([NATIVE, MULTIPROCESS], each={"by-position": 0, "with-their-number": 1})
def labels_by_position_are_warned_of_unless_a_number_is_beside_them(num_numbers: int) -> None:
    """Such a number may be what the model divides its loss by, as it is here."""
    model = accelerate(Tokens())
    optimizer = sgd(model)
    with heard() as lines:
        for batch in torchacc.shard_loader(DataLoader(rows_of_tokens(), 2), model):
            optimizer.zero_grad()
            model(batch["input_ids"], batch["labels"], *[torch.tensor(7.0)][:num_numbers]).loss.backward()
            optimizer.step()
    assert count(lines, UNEVEN) == 1 - num_numbers, lines


@case()
def numbers_of_items_that_differ_are_warned_of() -> None:
    model = accelerate(Tokens())
    optimizer = sgd(model)
    with heard() as lines:
        for index, batch in enumerate(torchacc.shard_loader(DataLoader(rows_of_tokens(), 2), model)):
            optimizer.zero_grad()
            items = torch.tensor(5.0 + index + (RANK if ENGINE != SPMD else 0))
            model(**batch, num_items_in_batch=items).loss.backward()
            optimizer.step()
    assert count(lines, "num_items_in_batch is") == (ENGINE != SPMD), lines
    assert count(lines, UNEVEN) == 0


@case()
def losses_that_a_trainer_weighs_say_nothing_of_their_labels() -> None:
    model = accelerate(Tokens())
    model.forward = weighed()(model.forward)
    lines = heard_of_epoch(model)
    assert count(lines, UNEVEN) == 0, lines


@case(each={"alone": 1, "of-micro-batches": 2})
def loop_of_the_page_divides_by_all_labels(micro_batches: int) -> None:
    """It is taken from the page, and gives the losses and the parameters of one device."""
    section = PAGE.read_text(encoding="utf-8").partition("## Labels that do not count")[2].partition("\n## ")[0]
    code = re.search("```python\n(.*?)```", section, re.DOTALL)[1]
    assert "islice(batches, 4)" in code
    code = code.replace("islice(batches, 4)", f"islice(batches, {micro_batches})")
    code = code.replace(".loss.backward()", ".loss; losses.append(loss); loss.backward()").replace(
        "model(**batch", "loss = model(**batch"
    )
    model, plain = sharded_and_plain(Tokens)
    losses: list[torch.Tensor] = []
    loader = torchacc.shard_loader(DataLoader(rows_of_tokens(), 2), model)
    names = {"torch": torch, "torchacc": torchacc, "model": model, "loader": loader, "losses": losses}
    with heard() as lines:
        exec(code, {**names, "optimizer": sgd(model)})
    assert count(lines, UNEVEN) == count(lines, "num_items_in_batch is") == count(lines, SAME) == 0, lines

    optimizer, found = sgd(plain), torch.stack(losses).detach().cpu().view(-1, micro_batches).sum(1)
    for index, batch in enumerate(DataLoader(rows_of_tokens(), 4 * micro_batches)):
        optimizer.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        check_equal(found[index], loss.detach(), f"loss of step {index}")
    check_parameters(model, plain)


@case([NATIVE])
def forward_in_training_that_one_process_alone_makes_waits_for_no_other() -> None:
    """What is seen is compared in steps, which all processes make."""
    model = accelerate(nn.Sequential(nn.Linear(8, 4)), sharding_strategy="NO_SHARD", size=1)
    if RANK == 0:
        model(part(X)[:1])
    step(model, part(X), sgd(model))
