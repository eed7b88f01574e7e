"""Every row of an evaluation exactly once, though every batch has all of its rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from torchacc import api
from torchacc.errors import DataError
from torchacc.integrations.hf.bridge import Bridge

_IGNORED = -100
"""A label that no loss counts."""


class EvalLoader:
    """The sharded batches of a loader; those of the last that fill it up have labels that no loss counts.

    While a batch is worked on, the bridge knows how many of its rows are the dataset's own.
    """

    def __init__(self, loader: "DataLoader[Any]", bridge: Bridge, model: torch.nn.Module) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise DataError(
                f"a {type(loader.dataset).__name__} does not say how many rows it has, so that those that fill up the "
                "last batch of all devices could not be told from them: evaluate on a dataset with a length"
            )
        self.dataset = loader.dataset
        self.num_rows = loader.batch_size * bridge.engine.topology.num_data_shards
        """Rows of a batch of all devices."""
        self.num_filling = 0 if loader.drop_last else -len(loader.dataset) % self.num_rows  # type: ignore[arg-type]
        """Rows that fill up the last batch."""
        self._bridge = bridge
        self._sharded = api.shard_loader(_filled_up(loader, self.num_filling) if self.num_filling else loader, model)

    def __len__(self) -> int:
        return len(self._sharded)

    def __iter__(self) -> Iterator[Any]:
        left = len(self.dataset)  # type: ignore[arg-type]
        state = self._bridge.gradient_state
        try:
            for index, batch in enumerate(self._sharded, start=1):
                self._bridge.num_rows = min(left, self.num_rows)
                state.end_of_dataloader = index == len(self._sharded)
                left -= self.num_rows
                yield batch
        finally:
            self._bridge.num_rows, state.end_of_dataloader = None, False


def _filled_up(loader: "DataLoader[Any]", num_filling: int) -> "DataLoader[Any]":
    return DataLoader(
        _FilledUp(loader.dataset),
        batch_size=loader.batch_size,
        sampler=_Then(loader.sampler, len(loader.dataset), num_filling),  # type: ignore[arg-type]
        collate_fn=_MaskFilling(loader.collate_fn),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
    )


@dataclass(frozen=True)
class _Filling:
    row: Any


class _FilledUp(Dataset[Any]):
    """A dataset that begins anew after its end."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        num_rows = len(self._dataset)
        return self._dataset[index] if index < num_rows else _Filling(self._dataset[index % num_rows])


class _Then(Sampler[int]):
    """The indices of a sampler, then those of the rows that fill up the last batch."""

    def __init__(self, sampler: Any, num_rows: int, num_filling: int) -> None:
        self._sampler = sampler
        self._filling = range(num_rows, num_rows + num_filling)

    def __len__(self) -> int:
        return len(self._sampler) + len(self._filling)

    def __iter__(self) -> Iterator[int]:
        yield from self._sampler
        yield from self._filling


@dataclass(frozen=True)
class _MaskFilling:
    """Collates rows, and masks the labels of those that fill up."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, rows: Sequence[Any]) -> Any:
        is_filling = [isinstance(row, _Filling) for row in rows]
        batch = self.collate([row.row if isinstance(row, _Filling) else row for row in rows])
        if any(is_filling):
            for name in ("labels", "shift_labels"):
                if name in batch:
                    batch[name] = _masked(batch[name], torch.tensor(is_filling))
        return batch


def _masked(labels: torch.Tensor, is_filling: torch.Tensor) -> torch.Tensor:
    if labels.is_floating_point():
        raise uneven("its labels are numbers, of which none means that a row does not count")
    return labels.masked_fill(is_filling.view(-1, *[1] * (labels.dim() - 1)), _IGNORED)


def uneven(reason: str) -> DataError:
    """Return the error for a dataset whose last batch cannot be filled up without changing the loss."""
    return DataError(
        "the rows of the evaluation do not divide by per_device_eval_batch_size times the number of devices, and the "
        f"rows that fill up the last batch would count in the loss, as {reason}: evaluate on a number of rows that "
        "divides (no per_device_eval_batch_size helps where it does not divide by the number of devices), or set "
        "dataloader_drop_last=True"
    )
