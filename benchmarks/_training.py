"""The training loop that all cases of `step_time.py` run: one model, one optimizer, the same batches."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _cases import GLOBAL_BATCH, HEADS, LEARNING_RATE, LENGTH, VOCABULARY, WIDTH
from _models import make_gpt2
from torch import nn
from torch.utils.data import DataLoader

Batch = dict[str, torch.Tensor]
Steps = Iterator[torch.Tensor]
"""Takes one training step each time that it is asked, and gives the step's loss."""


class CannotRunError(Exception):
    """A case does not do what it is to do on this machine."""


def make_model(layers: int) -> Any:
    """Return the model, with the same values in every process."""
    return make_gpt2(layers, WIDTH, HEADS, VOCABULARY, LENGTH)


def make_tokens(num_batches: int) -> torch.Tensor:
    """Return samples (num_batches * GLOBAL_BATCH, LENGTH); small tokens are frequent, so that there is much to learn.

    With tokens that are all equally frequent, a case that does not train would show the same loss as one that does.
    """
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(num_batches * GLOBAL_BATCH, LENGTH, generator=generator, dtype=torch.float64)
    return (uniform**4 * VOCABULARY).long()


def make_samples(tokens: torch.Tensor) -> Any:
    """Return the samples as a data set."""
    return [{"input_ids": row, "labels": row} for row in tokens]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every case."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def batches(tokens: torch.Tensor, rank: int = 0, processes: int = 1) -> Iterator[Batch]:
    """Cut samples into global batches, and these into one part for each process."""
    for whole in torch.split(tokens, GLOBAL_BATCH):
        part = whole.chunk(processes)[rank]
        yield {"input_ids": part, "labels": part}


def endless(batches: Any) -> Iterator[Any]:
    """Yield batches again and again."""
    while True:
        yield from batches


def share_cores(processes: int) -> None:
    """Give this process its share of the machine's cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
) -> Steps:
    """Train as PyTorch's tutorials do."""
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        yield loss.detach()


def train_sharded(model: Any, tokens: torch.Tensor, batch_size: int, config: Any) -> Steps:
    """Shard a model with torchacc, as a user does, and train it.

    Args:
        model: Whole, on the CPU.
        tokens: Samples, (number of samples, length).
        batch_size: Of one device.
        config: A `torchacc.Config`.
    """
    import torchacc

    loader: DataLoader[Batch] = DataLoader(make_samples(tokens), batch_size)
    model, sharded = torchacc.accelerate(model, loader, config)
    return train(model, make_optimizer(model), sharded)


def train_by_hand(
    model: Any, optimizer: torch.optim.Optimizer, batches: Iterator[Batch], put: Callable[..., Any]
) -> Steps:
    """Train as torch_xla's tutorials do, with no gradient alive when the step runs.

    Args:
        model: On the device.
        optimizer: Of its parameters.
        batches: On the host.
        put: Takes a tensor to the device.
    """
    import torch_xla

    for batch in batches:
        loss = model(**{name: put(tensor) for name, tensor in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        yield loss.detach()
