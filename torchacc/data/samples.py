"""Tells a sample from a batch, where a loader is not one."""

from collections.abc import Mapping
from typing import Any

import torch

from torchacc.errors import DataError, shown

_TARGETS = ("labels", "label", "target", "y")


def refuse_sample(first: Any, source: str) -> None:
    """Refuse what gives samples where batches are expected, by the first of them, as far as it can be told.

    Args:
        first: The first that it gives.
        source: What gives it, for the message.

    Raises:
        DataError: It is a sample.
    """
    if not _is_sample(first):
        return
    fields = first if isinstance(first, Mapping) else dict(enumerate(first))
    said = {
        name: tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        for name, value in fields.items()
    }
    raise DataError(
        f"{source} gives samples, and not batches: the first is of {shown(said)}. Wrap it: DataLoader(samples, "
        "batch_size=…)."
    )


def _is_sample(first: Any) -> bool:
    if isinstance(first, Mapping):
        target = next((first[name] for name in _TARGETS if name in first), None)
        return _has_one_row(first.get("input_ids")) or _is_class(target) or _holds_values_only(first)
    is_pair = isinstance(first, (list, tuple)) and len(first) == 2
    return is_pair and isinstance(first[0], torch.Tensor) and first[0].dim() > 0 and _is_class(first[1])


def _has_one_row(ids: Any) -> bool:
    """Tell whether tokens are those of one sequence."""
    if isinstance(ids, torch.Tensor):
        return ids.dim() == 1
    return isinstance(ids, (list, tuple)) and bool(ids) and type(ids[0]) is int


def _is_class(target: Any) -> bool:
    """Tell whether a target is one class, where a batch has one for each row."""
    if isinstance(target, torch.Tensor):
        return not target.dim() and not target.is_floating_point()
    return type(target) is int


def _holds_values_only(fields: Mapping[Any, Any]) -> bool:
    """Tell whether no field can have a row for each sample."""
    return bool(fields) and all(type(value) in (str, int, float, bool) for value in fields.values())
