"""Batches of a stage: collated with the number of their targets, gathered into the windows of a step."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from transformers import default_data_collator

from torchacc.data import AsyncLoader
from torchacc.errors import DataError
from torchacc.logging import get_logger
from torchacc.parallel.sequence_split import IGNORE_INDEX

_log = get_logger(__name__)

_COUNTS = "num_targets"

Batch = dict[str, Any]


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step, of the devices that this process feeds."""

    batches: list[Batch]
    """On the device."""
    num_targets: int
    """Tokens that are predicted in all of them."""


def collate(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Stack examples, and note how many targets each has, as a list that stays on the host.

    Args:
        rows: Examples with `labels` of shape (length,) beside their inputs.

    Returns:
        Tensors of shape (rows, …) by name.
    """
    batch: Batch = default_data_collator(list(rows))
    # The first label has no prediction: labels are shifted inside of the model.
    batch[_COUNTS] = (batch["labels"][:, 1:] != IGNORE_INDEX).sum(dim=1).tolist()
    return batch


def training_loader(
    dataset: Any, *, batch_size: int, examples_per_step: int, shuffle: bool, seed: int
) -> "DataLoader[Any]":
    """Make the loader of a training set, whose order depends on the seed and on no number of devices or micro-batches.

    An epoch is completed to full optimizer steps by going on from its start. (A stream is completed to full global
    batches only, and a step may reach into its next epoch.)

    Args:
        dataset: Examples: a map-style dataset, or an iterable one, which has an order of its own.
        batch_size: Of one device.
        examples_per_step: Of all devices and micro-batches.
        shuffle: Whether each epoch has a new order.
        seed: What decides on it.
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size, collate_fn=collate, generator=generator)
    if len(dataset) < examples_per_step:
        _log.info(
            "a step takes %d examples, and there are %d: it takes them repeatedly", examples_per_step, len(dataset)
        )
    order = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
    completed = _WholeSteps(order, examples_per_step)
    return DataLoader(dataset, batch_size, sampler=completed, collate_fn=collate, generator=generator)


def evaluation_loader(dataset: Any, *, batch_size: int, data_parallel_size: int) -> "DataLoader[Any]":
    """Make the loader of a validation set, completed to full global batches by examples without a target.

    Otherwise its last global batch would be completed by wrapping around, and some examples would count twice.

    Args:
        dataset: Examples, map-style or iterable.
        batch_size: Of one device.
        data_parallel_size: The number of data-parallel devices.
    """
    rows = batch_size * data_parallel_size
    completed: Any
    if isinstance(dataset, IterableDataset):
        completed = _CompletedStream(dataset, rows)
    else:
        if not len(dataset):
            raise DataError("the validation set is empty: give it more of the text, or write validation_share: 0")
        completed = ConcatDataset([dataset, _Repeated(_without_targets(dataset[0]), -len(dataset) % rows)])
    # A generator of its own: evaluating is to draw no number of the training's.
    return DataLoader(completed, batch_size, collate_fn=collate, generator=torch.Generator())


def windows(loader: Iterable[Batch], size: int) -> Iterator[Window]:
    """Yield windows of micro-batches for ever, epoch after epoch."""
    stream = take_counts(_endless(loader))
    while True:
        found = [next(stream) for _ in range(size)]
        yield Window([batch for batch, _ in found], sum(count for _, count in found))


def take_counts(batches: Iterable[Batch]) -> Iterator[tuple[Batch, int]]:
    """Yield each batch without the note of its targets, and their number."""
    for batch in batches:
        yield {name: value for name, value in batch.items() if name != _COUNTS}, sum(batch[_COUNTS])


def _endless(loader: Iterable[Batch]) -> Iterator[Batch]:
    while True:
        yield from loader


def _without_targets(row: Mapping[str, Any]) -> dict[str, Any]:
    labels = row["labels"]
    blank = torch.full_like(labels, IGNORE_INDEX) if isinstance(labels, torch.Tensor) else [IGNORE_INDEX] * len(labels)
    return {**row, "labels": blank}


class ElasticPosition:
    """Where a stage is in its data, as its checkpoints keep it: fit for another number of devices or micro-batches."""

    def __init__(self, loader: AsyncLoader) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position, without what tells epochs apart that are completed by other numbers."""
        state = self._loader.state_dict()
        left_out = ("number of batches", "num_data_shards")  # a step may have other micro-batches, too
        traits = {name: value for name, value in state["loader"].items() if name not in left_out}
        return {**state, "loader": traits, "order": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position from which the loader goes on."""
        self._loader.load_state_dict(state)


class _WholeSteps(Sampler[int]):
    """The order of another sampler, and its beginning again up to a multiple of a number of examples."""

    def __init__(self, sampler: Any, examples: int) -> None:
        self.sampler = sampler
        self._missing = -len(sampler) % examples

    def __len__(self) -> int:
        return len(self.sampler) + self._missing

    def __iter__(self) -> Iterator[int]:
        first: list[int] = []
        for index in self.sampler:
            if len(first) < self._missing:
                first.append(index)
            yield index
        yield from itertools.islice(itertools.cycle(first), self._missing)


class _Repeated(Dataset[Any]):
    """The same example several times."""

    def __init__(self, row: Any, count: int) -> None:
        self._row = row
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._row


class _CompletedStream(IterableDataset[Any]):
    """A stream, then examples without targets up to a multiple of a number of rows."""

    def __init__(self, stream: Iterable[Any], rows: int) -> None:
        self._stream = stream
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        count, row = 0, None
        for row in self._stream:
            count += 1
            yield row
        if row is None:
            raise DataError("the validation set is empty: give it more of the text, or write validation_share: 0")
        for _ in range(-count % self._rows):
            yield _without_targets(row)
