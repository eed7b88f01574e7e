"""What a model is called with: in half precision, as it came itself, or what it cannot take."""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch

from torchacc.data.tree import map_tensors
from torchacc.errors import DataError

_HALF = (torch.bfloat16, torch.float16)


def takes_half(forward: Callable[..., Any], dtypes: Collection[torch.dtype]) -> Callable[..., Any]:
    """Return a forward that computes in float32 and takes what a script has for the model as it was.

    Args:
        forward: The forward of the model as a whole.
        dtypes: Those of the model's parameters as it came; inputs in them are cast to float32, which changes no value.
    """

    @wraps(forward)
    def with_float32(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(lambda tensor: tensor.float() if tensor.dtype in dtypes else tensor, (args, kwargs))
        return forward(*args, **kwargs)

    return with_float32


def explain(error: Exception, inputs: Any, device: torch.device, compute_dtype: str) -> DataError | None:
    """Return what a forward that has raised was called with that it cannot take; None where its inputs do not say.

    Args:
        error: What it has raised.
        inputs: What it was called with.
        device: Where the model is.
        compute_dtype: What it computes in.
    """
    if type(error).__module__.startswith("torchacc."):
        return None
    tensors: list[torch.Tensor] = []
    map_tensors(tensors.append, inputs)
    away = next((tensor for tensor in tensors if tensor.device.type != device.type), None)
    if away is not None:
        return DataError(
            f"the model is on {device}, and was called with a tensor on {away.device}: use the batches of a loader of "
            "accelerate() or torchacc.shard_loader(loader, model), which are there, or move what else there is, "
            "tensor.to(next(model.parameters()).device)"
        )
    half = next((tensor for tensor in tensors if tensor.dtype in _HALF), None)
    if half is not None and compute_dtype == "float32":
        name = str(half.dtype).removeprefix("torch.")
        option = "bf16" if half.dtype == torch.bfloat16 else "fp16"
        return DataError(
            f"the model computes in float32, and was called with a tensor in {name}: pass float32, or let the model "
            f"compute in {name}, config.compute.{option} = True"
        )
    return None
