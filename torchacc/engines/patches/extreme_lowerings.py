"""Largest and smallest values, of which torch_xla loses a NaN, the places, or gradients of several equal ones."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_searches_nan: bool = True


@contextmanager
def nan_shows_anyway() -> Iterator[None]:
    """Context manager in which the largest values may lack a NaN, as it is found again in what is made of them."""
    global _searches_nan
    was, _searches_nan = _searches_nan, False
    try:
        yield
    finally:
        _searches_nan = was


def _amax(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    return _extreme(torch.max, x, dim, keepdim)


def _amin(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    return _extreme(torch.min, x, dim, keepdim)


def _extreme(find: Callable[..., Any], x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Return the largest or smallest values over dimensions, or over all if none is named, which torch_xla fails at."""
    if not x.dim():
        return x.clone()
    dims = sorted({d % x.dim() for d in dim} or range(x.dim()))
    for d in reversed(dims):
        x = find(x, d, keepdim=keepdim).values
    return x


def _largest(
    original: Callable[..., Any], x: torch.Tensor, dim: int, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest or smallest values and their places; torch_xla goes on without a NaN."""
    values, places = original(x, dim, keepdim)
    if x.is_floating_point() and _searches_nan:
        has_nan = x.isnan().any(dim, keepdim)
        values = torch.where(has_nan, torch.nan, values)
        places = torch.where(has_nan, _first_nan(x, dim, keepdim), places)
    return values, places


def _largest_of_all(original: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """Return the largest or smallest value; XLA:CPU's collectives lose a NaN that one of the devices has."""
    value: torch.Tensor = original(x)
    return torch.where(x.isnan().any(), torch.nan, value) if x.is_floating_point() else value


def _vector_norm(
    original: Callable[..., Any],
    x: torch.Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the norm of vectors; that of order infinity is a largest value."""
    norm: torch.Tensor = original(x, order, dim, keepdim, dtype=dtype)
    if not math.isinf(order):
        return norm
    is_nan = x.isnan()
    return torch.where(is_nan.any(list(dim), keepdim) if dim else is_nan.any().view(norm.shape), torch.nan, norm)


def _place_of_largest(
    original: Callable[..., Any], x: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    """Return the place of the largest or smallest value; torch_xla passes over a NaN."""
    place: torch.Tensor = original(x, dim, keepdim)
    if not x.is_floating_point():
        return place
    has_nan = x.isnan().any() if dim is None else x.isnan().any(dim, keepdim)
    return torch.where(has_nan, _first_nan(x, dim, keepdim), place)


def _first_nan(x: torch.Tensor, dim: int | None, keepdim: bool) -> torch.Tensor:
    return torch.argmax(x.isnan().int(), dim, keepdim)


def _cumulative_extreme(
    sign: int, original: Callable[..., Any], x: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the extremes so far and their last places, as PyTorch; torch_xla has the first, and goes on without NaN.

    Gradients go by the places.
    """
    values = original(x, dim)[0]
    if not x.dim():
        return values, torch.zeros_like(x, dtype=torch.int64)
    is_one = x == values
    if x.is_floating_point():
        is_nan = x.isnan()
        values = torch.where(is_nan.long().cumsum(dim) > 0, torch.nan, values)
        is_one = torch.where(values.isnan(), is_nan, is_one)
    shape = [-1 if other == dim % x.dim() else 1 for other in range(x.dim())]
    places = torch.arange(x.shape[dim], device=x.device).view(shape)
    return values, sign * original(torch.where(is_one, sign * places, 0), dim)[0]


def _ordered(
    original: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values by size, and their places; in bfloat16 torch_xla puts a NaN at the other end than PyTorch."""
    values, places = original(x.float() if x.dtype == torch.bfloat16 else x, *args, **kwargs)
    return values.to(x.dtype), places


EXTREMES: dict[str, Callable[..., torch.Tensor]] = {"amax": _amax, "amin": _amin}
"""By name."""

AROUND_EXTREMES: dict[str, Callable[..., Any]] = {
    "max": _largest_of_all,
    "min": _largest_of_all,
    "max.dim": _largest,
    "min.dim": _largest,
    "argmax": _place_of_largest,
    "argmin": _place_of_largest,
    "cummax": functools.partial(_cumulative_extreme, 1),
    "cummin": functools.partial(_cumulative_extreme, -1),
    "linalg_vector_norm": _vector_norm,
    "sort": _ordered,
    "sort.stable": _ordered,
    "topk": _ordered,
    "kthvalue": _ordered,
}
"""By name; their first argument is torch_xla's own operation."""
