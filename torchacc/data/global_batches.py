"""Group batches into global batches, each one batch per data-parallel device, and join those of one process."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torchacc.data.tree import concat, num_rows, take
from torchacc.errors import DataError


def make_global_batches(
    batches: Iterator[Any],
    data_parallel_size: int,
    *,
    drop_last: bool,
    batch_size: int | None = None,
    skip: int = 0,
) -> Iterator[list[Any]]:
    """Group an epoch's batches into global batches of one per device, the last one completed or dropped.

    Args:
        batches: All the batches of the epoch.
        data_parallel_size: How many make a global batch.
        drop_last: Whether to drop an incomplete global batch.
        batch_size: Where batches are lists of samples of one size, to be completed sample by sample.
        skip: How many batches to leave out. They are read at once, the rest as the global batches are asked for.
    """
    first = list(itertools.islice(batches, data_parallel_size)) if skip else []
    left = itertools.chain(first, batches)
    next(itertools.islice(left, skip, skip), None)
    return _grouped(left, first, data_parallel_size, drop_last, batch_size)


def _grouped(
    batches: Iterator[Any], first: list[Any], data_parallel_size: int, drop_last: bool, batch_size: int | None
) -> Iterator[list[Any]]:
    """Group batches into global batches, and complete the last one with the first batches of the epoch, where known."""
    count = len(first)
    while found := list(itertools.islice(batches, data_parallel_size)):
        count += len(found)
        if len(found) < data_parallel_size and drop_last:
            break
        first = first or found
        if batch_size is None:
            yield list(itertools.islice(itertools.chain(found, itertools.cycle(first)), data_parallel_size))
        else:
            samples = itertools.chain(*found, itertools.cycle(itertools.chain(*first)))
            yield [list(itertools.islice(samples, batch_size)) for _ in range(data_parallel_size)]
    if not count:
        raise DataError(
            "The loader gave no batch. Check that its dataset is not empty, that drop_last=True leaves something of "
            "it, and that it is not an iterator, which lasts for one epoch: pass a list or a DataLoader."
        )
    if not first:
        raise DataError(
            f"The loader gave {count} batches for {data_parallel_size} data-parallel devices, and drop_last=True drops "
            f"an incomplete global batch: {count} // {data_parallel_size} = 0 steps. Write drop_last=False to complete "
            f"it, or a batch_size of at most 1/{-(-data_parallel_size // count)} of this one."
        )


def num_global_batches(batches: int, data_parallel_size: int, drop_last: bool) -> int:
    """Return how many global batches an epoch of so many batches has."""
    return batches // data_parallel_size if drop_last else -(-batches // data_parallel_size)


def describe_global_batch(data_parallel_size: int, size: int | None) -> str:
    """Return in words what a global batch is made of.

    Args:
        data_parallel_size: How many batches.
        size: Rows of a batch; None where it is not known.
    """
    if size is None:
        return "1 batch" if data_parallel_size == 1 else f"{data_parallel_size} batches"
    if data_parallel_size == 1:
        return _counted(size, "row")
    return f"{_counted(size, 'row')} x {data_parallel_size} devices = {size * data_parallel_size}"


def describe_epoch(
    data_parallel_size: int,
    *,
    batches: int | None,
    size: int | None,
    rows: int | None,
    drop_last: bool,
    fills_count: bool = True,
) -> str:
    """Return in words what an epoch is made of, and what becomes of its last rows.

    Args:
        data_parallel_size: How many batches make a global batch.
        batches: Batches of an epoch.
        size: Rows of each but the last.
        rows: Rows of an epoch. Of these three, None where it is not known.
        drop_last: Whether an incomplete global batch is dropped.
        fills_count: Whether losses count the rows that complete it otherwise.
    """
    said = f"{describe_global_batch(data_parallel_size, size)} in a step"
    if batches is None:
        end = "an incomplete last step is left out (drop_last)" if drop_last else "the last completed from its start"
        return f"{said}, as many steps as the stream has batches for, {end}"
    steps = num_global_batches(batches, data_parallel_size, drop_last)
    said += f", {steps} step{'' if steps == 1 else 's'} an epoch"
    given, used, unit = batches, steps * data_parallel_size, "batch"
    if size is not None and rows is not None:
        given, used, unit = rows, steps * data_parallel_size * size, "row"
    if used < given:
        return f"{said}, the last {_counted(given - used, unit)} left out (drop_last)"
    if used > given:
        why = "they count; drop_last=True leaves it out" if fills_count else "they do not count"
        return f"{said}, the last completed with {_counted(used - given, unit)} of the epoch's start ({why})"
    return said


def _counted(count: int, unit: str) -> str:
    return f"{count} {unit}" if count == 1 else f"{count} {unit}{'es' if unit == 'batch' else 's'}"


def fill(batch: Any, first: Any) -> Any:
    """Fill a batch up to the number of rows of the first batch, with the first batch's rows."""
    rows, size = num_rows(batch), num_rows(first)
    if not rows or not size or rows >= size:
        return batch
    try:
        return take(concat([batch, first]), size)
    except DataError:  # padded to another length than the first: its own rows fit
        return take(concat([batch] * -(-size // rows)), size)


def join(batches: Sequence[Any]) -> Any:
    """Concatenate the batches of several devices."""
    if len(batches) == 1:
        return batches[0]
    check_even([num_rows(batch) for batch in batches])
    return concat(batches)


def check_even(rows: list[int | None]) -> None:
    """Refuse batches of one process that have different numbers of rows, or None.

    Raises:
        DataError: They have.
    """
    if len(rows) > 1 and (len(set(rows)) > 1 or None in rows):
        raise DataError(
            f"One process feeds {len(rows)} devices, which share its batch out evenly, but their batches have {rows} "
            f"rows (None: its parts disagree, or have none). Give every batch the same size, or run one process per "
            f"device."
        )
