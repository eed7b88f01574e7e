"""States as JSON and tensors: what a scheduler, a data loader or a user keeps, without pickle."""

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchacc.errors import CheckpointError

_TAG = "$"
_AS_THEY_ARE = {int, float, bool, str, type(None)}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def encode(value: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    """Return a value as JSON has it; `decode` gives it back, with tuples, other keys than strings, bytes and tensors.

    Args:
        value: Nested dicts, lists, tuples and sets of numbers, strings, bytes, tensors, arrays, dtypes and None.
        tensors: Gains the tensors, by their path.
        path: Where the value stands, for names of tensors and for the error.

    Raises:
        CheckpointError: The value holds anything else.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor | np.ndarray) and _is_plain(value):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        while path in tensors:  # of the keys 1 and "1"
            path += "'"
        tensors[path] = torch.as_tensor(value).detach().cpu().clone()
        return {_TAG: kind, "value": path}
    if isinstance(value, Counter):  # of MultiStepLR, which calls its methods
        return {_TAG: "counter", "value": _encode_mapping(dict(value), tensors, path)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, list | tuple | set | frozenset):
        items = list(value)
        if not set(map(type, items)) <= _AS_THEY_ARE:  # a generator's state has hundreds of numbers
            items = [encode(item, tensors, f"{path}.{index}") for index, item in enumerate(items)]
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind)).__name__
        return items if kind == "list" else {_TAG: kind, "value": items}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint does not hold, as reading it could run code: save its "
        "numbers, strings, tensors, lists and dicts"
    )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, list):
        are_all_plain = set(map(type, value)) <= _AS_THEY_ARE
        return list(value) if are_all_plain else [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    inner: Any = value.get("value")
    if kind is None:
        return {key: decode(item, tensors) for key, item in value.items()}
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if kind == "dtype":
        return _DTYPES[inner]
    if kind == "counter":
        return Counter(decode(inner, tensors))
    if kind in ("tensor", "array"):
        return tensors[inner].clone() if kind == "tensor" else tensors[inner].numpy().copy()
    items = decode(inner, tensors)
    if kind == "dict":
        return dict(items)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def _is_plain(value: Any) -> bool:
    """Return whether a safetensors file can hold a tensor or array: of numbers, and strided."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided
    return value.dtype.kind in "biufc"


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], path: str) -> Any:
    if all(isinstance(key, str) for key in value) and _TAG not in value:
        return {key: encode(item, tensors, f"{path}.{key}") for key, item in value.items()}
    pairs = [[encode(key, tensors, path), encode(item, tensors, f"{path}.{key}")] for key, item in value.items()]
    return {_TAG: "dict", "value": pairs}
