"""Pads batches to a few lengths, so that a compiled training step meets few shapes."""

import copy
from bisect import bisect_left
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from torchacc.errors import ConfigError, DataError
from torchacc.parallel.sequence_split import IGNORE_INDEX

_NUM_BUCKETS = 8
_PAD_VALUES: dict[str, float] = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": IGNORE_INDEX,
    "token_type_ids": 0,
    "position_ids": 0,
}


def make_buckets(
    buckets: Sequence[int] | None = None,
    max_length: int | None = None,
    num_buckets: int | None = None,
) -> tuple[int, ...]:
    """Work out the lengths that batches are padded to.

    Args:
        buckets: The lengths themselves, ascending.
        max_length: The last length, where the others are to be spread evenly below it.
        num_buckets: How many lengths to spread; 8 where not given.

    Returns:
        The lengths, ascending; the last is the longest that a batch may have.

    Raises:
        ConfigError: For lengths that are not positive, ascending and unique, or arguments that contradict each other.
    """
    if buckets is not None:
        return _explicit_buckets(tuple(buckets), max_length, num_buckets)
    if max_length is None:
        raise ConfigError(
            f"buckets=None and max_length=None (num_buckets={num_buckets}) name no length to pad to. "
            f"Write max_length=512, or buckets=[128, 256, 512]."
        )
    count = _NUM_BUCKETS if num_buckets is None else num_buckets
    if not _is_positive(max_length) or not _is_positive(count):
        raise ConfigError(
            f"max_length={max_length!r} and num_buckets={count!r} must be positive integers, say max_length=512 and "
            f"num_buckets={_NUM_BUCKETS}."
        )
    # Rounded up, and unique where there are more buckets than lengths.
    return tuple(sorted({-(-max_length * i // count) for i in range(1, count + 1)}))


def _explicit_buckets(buckets: tuple[int, ...], max_length: int | None, num_buckets: int | None) -> tuple[int, ...]:
    if not buckets or not all(map(_is_positive, buckets)):
        raise ConfigError(f"buckets={list(buckets)} must be positive integers, say buckets=[128, 256, 512].")
    if list(buckets) != sorted(set(buckets)):
        raise ConfigError(f"buckets={list(buckets)} must ascend without repeats: write buckets={sorted(set(buckets))}.")
    if max_length is not None and max_length != buckets[-1]:
        raise ConfigError(
            f"max_length={max_length} contradicts buckets={list(buckets)}, whose last is the longest length. "
            f"Leave max_length out, or end buckets with {max_length}."
        )
    if num_buckets is not None and num_buckets != len(buckets):
        raise ConfigError(
            f"num_buckets={num_buckets} contradicts the {len(buckets)} lengths of buckets={list(buckets)}. "
            f"Leave num_buckets out, or give max_length instead of buckets."
        )
    return buckets


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class Bucketing:
    """Pads every batch to the smallest bucket that holds it.

    `input_ids`, `attention_mask`, `labels`, `token_type_ids` and `position_ids` are padded where a batch has them, with
    0, 0, -100, 0 and 0. Labels with one value per sample (one dim) have no length and pass through, as do keys that
    nobody names.

    Args:
        buckets: The lengths to pad to, as `make_buckets` gives them.
        pad_values: What to pad a key with, added to the above or in place of it; None leaves the key alone.
            Say {"input_ids": tokenizer.pad_token_id}.
        pad_dims: The dim along which a key is padded; its last where not given.
        truncate: Whether a batch longer than the last bucket is cut, instead of refused.

    Raises:
        ConfigError: For a key of `pad_dims` that has no pad value.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        *,
        pad_values: Mapping[str, float | None] | None = None,
        pad_dims: Mapping[str, int] | None = None,
        truncate: bool = False,
    ) -> None:
        self.buckets = make_buckets(buckets)
        self.pad_dims = dict(pad_dims or {})
        self.truncate = truncate
        self._named = {*(pad_values or {}), *self.pad_dims}
        values = {**_PAD_VALUES, **(pad_values or {})}
        self.pad_values = {key: value for key, value in values.items() if value is not None}
        if unpaired := sorted(self.pad_dims.keys() - self.pad_values.keys()):
            raise ConfigError(
                f"pad_dims={self.pad_dims} names {unpaired}, which have no pad value. "
                f"Write pad_values={{{unpaired[0]!r}: 0}} as well."
            )

    def __call__(self, batch: Any) -> Any:
        """Pad one batch.

        Args:
            batch: A mapping with tensors; it is left as it is.

        Returns:
            A mapping of the same type.

        Raises:
            DataError: For a batch that is longer than the last bucket, has nothing to pad, or whose keys to pad
                disagree on its length.
        """
        if not isinstance(batch, MutableMapping):
            raise DataError(
                f"Bucketing pads by key, but the batch is a {type(batch).__name__}. Let collate_fn return a dict, or "
                f"leave buckets and max_length out of the config."
            )
        dims = {key: dim for key in self.pad_values if key in batch and (dim := self._dim(key, batch[key])) is not None}
        key, length = self._length(batch, dims)
        target = self._target(key, length)
        padded = copy.copy(batch)
        for name, dim in dims.items():
            padded[name] = _resize(batch[name], dim, target, self.pad_values[name])
        return padded

    def _dim(self, key: str, value: Any) -> int | None:
        """Return the dim along which to pad, counted from 0, or None for a known key without a length."""
        if value is None and key not in self._named:
            return None
        if not isinstance(value, torch.Tensor):
            raise DataError(
                f"{key!r} is a {type(value).__name__}, which cannot be padded. Let collate_fn return tensors (with a "
                f"tokenizer: return_tensors='pt'), or leave the key alone with pad_values={{{key!r}: None}}."
            )
        if value.ndim < 2 and key not in self._named:
            return None
        if key == "attention_mask" and value.ndim > 2 and key not in self._named:
            raise DataError(
                f"'attention_mask' has shape {tuple(value.shape)}: two of its dims are lengths, but only one "
                f"would be padded. Pass the 2-D padding mask, or leave the key alone with "
                f"pad_values={{'attention_mask': None}}."
            )
        dim = self.pad_dims.get(key, -1)
        dim = dim + value.ndim if dim < 0 else dim
        if not 0 < dim < value.ndim:
            raise DataError(
                f"{key!r} has shape {tuple(value.shape)} and cannot be padded along dim {self.pad_dims.get(key, -1)}: "
                f"dim 0 holds the samples. Name another dim, say pad_dims={{{key!r}: 1}}, or leave the key alone with "
                f"pad_values={{{key!r}: None}}."
            )
        return dim

    def _length(self, batch: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> tuple[str, int]:
        lengths = {key: batch[key].shape[dim] for key, dim in dims.items()}
        if not lengths:
            raise DataError(
                f"The batch has nothing to pad: its keys are {sorted(map(str, batch))}, the keys to pad are "
                f"{sorted(self.pad_values)}. Name one, say pad_values={{'input_values': 0.0}}."
            )
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"The keys to pad disagree on the length of the batch: {lengths}. Name the dim that is the length, say "
                f"pad_dims={{'input_values': 1}}, or leave a key alone, say pad_values={{'labels': None}}."
            )
        return next(iter(lengths.items()))

    def _target(self, key: str, length: int) -> int:
        if length <= self.buckets[-1]:
            return self.buckets[bisect_left(self.buckets, length)]
        if self.truncate:
            return self.buckets[-1]
        raise DataError(
            f"{key!r} is {length} long, more than the last bucket, {self.buckets[-1]}. Set max_length (or the last of "
            f"buckets) to {length} or more, shorten the samples (with a tokenizer: truncation=True), or pass "
            f"truncate=True."
        )


def _resize(tensor: torch.Tensor, dim: int, length: int, value: float) -> torch.Tensor:
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor.narrow(dim, 0, length)
    shape = [*tensor.shape]
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)
