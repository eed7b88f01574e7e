"""The softmax of attention's scores, which PyTorch searches for rows that see nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_all_rows_see: bool = False


@contextmanager
def all_rows_see_something() -> Iterator[None]:
    """Context manager in which no row of scores is masked as a whole, as where there is no mask, or a causal one alone.

    PyTorch's formula puts zeros into such rows. To find them XLA reads all scores once more, and keeps them for that.
    """
    global _all_rows_see
    was, _all_rows_see = _all_rows_see, True
    try:
        yield
    finally:
        _all_rows_see = was


def _safe_softmax(
    original: Callable[..., torch.Tensor], x: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the softmax, with zeros in rows that are masked as a whole where there may be some."""
    return torch.softmax(x, dim, dtype) if _all_rows_see else original(x, dim, dtype)


AROUND_SOFTMAX: dict[str, Callable[..., Any]] = {"_safe_softmax": _safe_softmax}
"""By name; their first argument is what there was before."""
