"""Rows that complete the last batch of all devices, and how they are kept from counting."""

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from torchacc import api
from torchacc.engines.base import Engine
from torchacc.errors import DataError
from torchacc.integrations.hf.accelerator import AcceleratorAdapter
from torchacc.integrations.hf.losses import are_classes
from torchacc.parallel.sequence_split import IGNORE_INDEX


class EvalLoader:
    """The sharded batches of a loader; the rows that complete the last have labels that no loss counts.

    While a batch is worked on, the adapter knows how many of its rows are the dataset's own.
    """

    def __init__(self, loader: "DataLoader[Any]", accelerator: AcceleratorAdapter, model: nn.Module) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise DataError(
                f"a {type(loader.dataset).__name__} does not say how many rows it has, so that those that fill up the "
                "last batch of all devices could not be told from them: evaluate on a dataset with a length"
            )
        self.dataset = loader.dataset
        self.num_rows = loader.batch_size * accelerator.engine.mesh.data_parallel_size
        """Rows of a batch of all devices."""
        self.num_filling = 0 if loader.drop_last else -len(loader.dataset) % self.num_rows  # type: ignore[arg-type]
        """Rows that complete the last batch."""
        self.batch_size = loader.batch_size
        """Rows of a batch of one device."""
        self._num_examples = loader.batch_size * len(accelerator.engine.data_parallel_ranks)
        self._accelerator = accelerator
        self._sharded = api.shard_loader_for_trainer(loader, model, fills_count=False)

    def __len__(self) -> int:
        return len(self._sharded)

    def __iter__(self) -> Iterator[Any]:
        left = len(self.dataset)  # type: ignore[arg-type]
        state = self._accelerator.gradient_state
        try:
            for index, batch in enumerate(self._sharded, start=1):
                self._accelerator.num_rows = min(left, self.num_rows)
                state.end_of_dataloader = index == len(self._sharded)
                num_filling = self.num_rows - self._accelerator.num_rows
                yield masked(batch, self._accelerator.engine, num_filling, self._num_examples)
                left -= self.num_rows
        finally:
            self._accelerator.num_rows, state.end_of_dataloader = None, False


def num_own(engine: Engine, num_rows: int, num_filling: int) -> int:
    """Return how many of this process's rows of a batch count.

    Args:
        engine: What the model runs on.
        num_rows: This process's.
        num_filling: Those of all devices, at the end of the last ones' rows, that do not count.
    """
    after = engine.mesh.data_parallel_size - engine.data_parallel_ranks[-1] - 1
    num_after = after * num_rows // len(engine.data_parallel_ranks)
    return num_rows - min(max(num_filling - num_after, 0), num_rows)


def masked(batch: Any, engine: Engine, num_filling: int, num_examples: int) -> Any:
    """Return a batch whose rows that do not count have labels that no loss counts, where those are classes.

    Args:
        batch: This process's.
        engine: What the model runs on.
        num_filling: Rows of all devices that do not count.
        num_examples: How many examples this process's batch is made of.

    Raises:
        DataError: The batch has not a row for each example, so that it is not known which rows do not count.
    """
    names = [name for name in ("labels", "shift_labels") if num_filling and name in batch and are_classes(batch[name])]
    if not names:
        return batch
    batch = copy.copy(batch)
    for name in names:
        if len(batch[name]) != num_examples:
            raise DataError(
                f"the last batch of all devices is completed with {num_filling} examples that must not count, and a "
                f"batch of {num_examples} has {len(batch[name])} rows, so that it is not known which they are: set "
                "dataloader_drop_last=True, or take as many examples as divide by the rows of a step"
            )
        labels = batch[name].cpu().clone()  # moved as batches are: otherwise the step would be another program
        labels[num_own(engine, len(labels), num_filling) :] = IGNORE_INDEX
        batch[name] = engine.to_device(labels)
    return batch


def uneven(reason: str) -> DataError:
    """Return the error for a dataset whose last batch cannot be filled up without changing the loss."""
    return DataError(
        "the rows of the evaluation do not divide by per_device_eval_batch_size times the number of devices, and the "
        f"rows that fill up the last batch would count in the loss, as {reason}: evaluate on a number of rows that "
        "divides (no per_device_eval_batch_size helps where it does not divide by the number of devices), or set "
        "dataloader_drop_last=True"
    )
