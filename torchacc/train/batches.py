"""Batches of a stage: collated with the number of their targets, gathered into the windows of a step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset
from transformers import default_data_collator

from torchacc.errors import DataError

NO_TARGET = -100
"""The label of a token that nothing is to be learnt from; as in PyTorch's cross entropy."""
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
    batch[_COUNTS] = (batch["labels"][:, 1:] != NO_TARGET).sum(dim=1).tolist()
    return batch


def training_loader(dataset: Any, *, batch_size: int, shuffle: bool, seed: int) -> "DataLoader[Any]":
    """Make the loader of a training set; its order depends on the seed alone, and on no number of devices.

    Args:
        dataset: Examples: a map-style dataset, or an iterable one, which has an order of its own.
        batch_size: Of one device.
        shuffle: Whether each epoch has a new order; without effect on an iterable dataset.
        seed: What decides on it.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = shuffle and not isinstance(dataset, IterableDataset)
    return DataLoader(dataset, batch_size, shuffle=shuffled, collate_fn=collate, generator=generator)


def evaluation_loader(dataset: Any, *, batch_size: int, num_data_shards: int) -> "DataLoader[Any]":
    """Make the loader of a validation set, completed to whole global batches by examples without a target.

    Otherwise its last global batch would be completed by wrapping around, and some examples would count twice.

    Args:
        dataset: Examples, map-style or iterable.
        batch_size: Of one device.
        num_data_shards: The number of data-parallel devices.
    """
    rows = batch_size * num_data_shards
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
    """Yield windows of micro-batches for ever, epoch after epoch; a window may reach into the next epoch."""
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
    blank = torch.full_like(labels, NO_TARGET) if isinstance(labels, torch.Tensor) else [NO_TARGET] * len(labels)
    return {**row, "labels": blank}


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
            raise DataError("the validation set is empty: give it more of the text, or write validation: null")
        for _ in range(-count % self._rows):
            yield _without_targets(row)
