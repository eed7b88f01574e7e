"""Walks over the nested containers that a batch is made of.

Containers are mappings, lists, tuples, named tuples and dataclasses; they keep their type. Tensors are the leaves that
count; whatever else there is (None, numbers, text, numpy arrays) passes through.

A list or tuple that holds a tensor somewhere is a container of fields, as `default_collate` makes of `(x, y)` samples.
One that holds none has an element per row, as `default_collate` makes of text.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from torchacc.errors import DataError


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply `fn` to every tensor of `tree`.

    Returns:
        A new tree with containers of the same types; `tree` itself is left alone.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    fields = _fields(tree)
    if fields is None:
        return tree
    return _rebuild(tree, {key: map_tensors(fn, value) for key, value in fields.items()})


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of `tree`, in the order in which `map_tensors()` comes to them."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [tensor for value in (_fields(tree) or {}).values() for tensor in tensors_in(value)]


def num_rows(tree: Any) -> int | None:
    """Count the rows of a batch: the size that dim 0 of its tensors and its row lists share.

    Returns:
        None where nothing in `tree` has rows, or where its parts disagree.
    """
    sizes = set(_row_counts(tree))
    return sizes.pop() if len(sizes) == 1 else None


def take(tree: Any, n: int) -> Any:
    """Take the first `n` rows of every tensor and of every row list; the rest passes through."""
    if isinstance(tree, torch.Tensor):
        return tree[:n] if tree.ndim else tree
    if _is_rows(tree):
        return tree[:n]
    fields = _fields(tree)
    if fields is None:
        return tree
    return _rebuild(tree, {key: take(value, n) for key, value in fields.items()})


def concat(trees: Sequence[Any]) -> Any:
    """Concatenate batches of one structure: tensors along dim 0, row lists end to end, the rest kept where equal.

    Raises:
        DataError: Where the structures differ, tensors do not fit together, or what has no rows is not equal.
    """
    assert trees, "concat() of no batches"
    return trees[0] if len(trees) == 1 else _concat(trees, "batch")


def _concat(trees: Sequence[Any], path: str) -> Any:
    head = trees[0]
    if any(type(tree) is not type(head) for tree in trees):
        names = ", ".join(sorted({type(tree).__name__ for tree in trees}))
        raise DataError(
            f"{path} is of different types from batch to batch ({names}), so the batches cannot be joined. "
            f"Let the loader give every batch the same structure."
        )
    if isinstance(head, torch.Tensor) and head.ndim:
        return _concat_tensors(trees, path)
    if all(_is_rows(tree) for tree in trees):
        return type(head)(row for tree in trees for row in tree)
    fields = [_fields(tree) for tree in trees]
    if fields[0] is None:
        return _equal(trees, path)
    keys = list(fields[0])
    if any(f is None or set(f) != set(keys) for f in fields):
        raise DataError(
            f"{path} has different keys from batch to batch ({[list(f or ()) for f in fields]}), so the batches cannot "
            f"be joined. Let the loader give every batch the same keys."
        )
    return _rebuild(head, {key: _concat([f[key] for f in fields if f], f"{path}[{key!r}]") for key in keys})


def _concat_tensors(tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        raise DataError(
            f"{path} has shapes {[tuple(t.shape) for t in tensors]}, which differ beyond dim 0, so the batches cannot "
            f"be joined. Pad to one length in collate_fn (say padding='max_length'), or load from a map-style "
            f"dataset, where collate_fn sees all the samples at once."
        )
    return torch.cat(list(tensors))


def _equal(values: Sequence[Any], path: str) -> Any:
    try:
        if all(bool(value == values[0]) for value in values[1:]):
            return values[0]
    except (RuntimeError, ValueError):  # an array's == has no one truth value
        pass
    raise DataError(
        f"{path} is a {type(values[0]).__name__} without rows, and not the same in every batch, so the batches cannot "
        f"be joined. Give it as a tensor with one row per sample, or leave it out of the batch."
    )


def _row_counts(tree: Any) -> Iterator[int]:
    if isinstance(tree, torch.Tensor):
        if tree.ndim:
            yield tree.shape[0]
    elif _is_rows(tree):
        yield len(tree)
    else:
        for value in (_fields(tree) or {}).values():
            yield from _row_counts(value)


def _is_rows(tree: Any) -> bool:
    return isinstance(tree, (list, tuple)) and not _is_namedtuple(tree) and not _has_tensor(tree)


def _has_tensor(tree: Any) -> bool:
    return isinstance(tree, torch.Tensor) or any(map(_has_tensor, (_fields(tree) or {}).values()))


def _is_namedtuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def _fields(tree: Any) -> dict[Any, Any] | None:
    """Return what a container holds, by key, or None for a leaf."""
    if isinstance(tree, MutableMapping):
        return dict(tree.items())
    if isinstance(tree, PackedSequence):  # PyTorch reads `batch_sizes` on the host: it stays there, as it is
        return {index: field for index, field in enumerate(tree) if tree._fields[index] != "batch_sizes"}
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    return None


def _rebuild(tree: Any, fields: dict[Any, Any]) -> Any:
    """Return a container like `tree` that holds `fields`."""
    if isinstance(tree, tuple):
        # A named tuple's own constructor may look at its fields, as that of a PackedSequence does.
        kind: Any = type(tree)
        values = [fields.get(index, value) for index, value in enumerate(tree)]
        return kind._make(values) if _is_namedtuple(tree) else kind(values)
    # A copy keeps what no constructor takes back: BatchEncoding's encodings, a defaultdict's factory.
    new = copy.copy(tree)
    if isinstance(tree, (MutableMapping, list)):
        for key, value in fields.items():
            new[key] = value
    else:
        for key, value in fields.items():
            object.__setattr__(new, key, value)  # a frozen dataclass refuses a plain assignment
    return new
