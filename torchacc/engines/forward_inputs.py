"""What a model is called with: on the CPU, in half precision, as it came itself, or what it cannot take."""

from collections.abc import Callable, Collection
from functools import wraps
from inspect import Signature
from typing import Any

import torch

from torchacc.data.tree import map_tensors, tensors_in
from torchacc.errors import DataError
from torchacc.logging import get_logger

_log = get_logger(__name__)

CACHES = ("past_key_values", "cache")
"""How transformers calls the keys and values to generate with: by the second name since 5.24, which takes both."""
_HALF = (torch.bfloat16, torch.float16)


class InputMover:
    """Moves inputs of a forward that lie on the CPU, as DistributedDataParallel and FSDP2 do.

    Args:
        device: The model's device.
        put: Moves a list of host tensors there, in one transfer.
    """

    def __init__(self, device: torch.device, put: Callable[[Any], Any]) -> None:
        self._device = device
        self._put = put
        self._has_moved = False

    def __call__(self, inputs: Any) -> Any:
        """Return inputs, of any nesting, with those on the CPU moved to the device."""
        found = []
        if self._device.type != "cpu":
            found = [tensor for tensor in tensors_in(inputs) if tensor.device.type == "cpu"]
        if not found:
            return inputs
        if not self._has_moved:
            self._has_moved = True
            _log.info(
                "the model was called with tensors on the CPU, which its forward moves to %s. What else a loss takes "
                "has to be moved there by the script, labels.to(output.device); a loader that is handed to "
                "accelerate() gives batches that are there, with the rows of all devices (its batch_size is that of "
                "one), and readies the next one meanwhile",
                self._device,
            )
        moved = iter(self._put(found))
        return map_tensors(lambda tensor: next(moved) if tensor.device.type == "cpu" else tensor, inputs)


def inputs_by_name(signature: Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what a forward is called with, by name, those of its variable keywords among them, without `None`."""
    bound = signature.bind(*args, **kwargs).arguments
    variable = next((each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD), None)
    more = bound.pop(variable, {}) if variable is not None else {}
    return {name: value for name, value in {**bound, **more}.items() if value is not None}


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
    tensors = tensors_in(inputs)
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
