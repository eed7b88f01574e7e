"""What a model returns in low precision, and a script computes its loss from, comes back in float32."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from torchacc.chunked_loss.lazy_logits import LazyLogits
from torchacc.data.tree import map_tensors


def returns_float32(forward: Callable[..., Any], lowered: torch.dtype) -> Callable[..., Any]:
    """Return a model's forward with outputs in float32.

    Args:
        forward: The forward of the model as a whole.
        lowered: The dtype that it computes in; tensors in others come back as they are.
    """

    @wraps(forward)
    def with_float32(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return _in_float32(output, lowered, numbers_only=_has_loss(output))

    return with_float32


def _in_float32(output: Any, lowered: torch.dtype, *, numbers_only: bool) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        kind: Any = type(tensor)
        is_lowered = tensor.dtype == lowered and kind is not LazyLogits
        return tensor.float() if is_lowered and not (numbers_only and tensor.dim()) else tensor

    return map_tensors(cast, output)


def _has_loss(output: Any) -> bool:
    """Return whether a model has computed its loss: then what else it returns need not take twice the memory.

    That is what an output calls `loss`, as transformers' do, or the first of a tuple, where it has no dimension.
    """
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        first = output[0] if output else None
        return isinstance(first, torch.Tensor) and not first.dim()
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    return isinstance(loss, torch.Tensor)
