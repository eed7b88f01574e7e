"""The dtype that a model computes in, whatever autocast a script has around it."""

import functools

import torch

from torchacc.logging import get_logger

_log = get_logger(__name__)


def autocast_to(dtype: torch.dtype | None, device: str) -> torch.autocast:
    """Return a context in which a device computes in a dtype; None is that of the parameters.

    A script's own autocast, which has no effect in it, is warned of once.
    """
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != dtype:
        _warn(torch.get_autocast_dtype(device))
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None)


@functools.cache
def _warn(asked: torch.dtype) -> None:
    _log.warning(
        "torch.autocast(dtype=%s) around a model has no effect inside of it: config.compute.bf16 and "
        "config.compute.fp16 choose what it computes in",
        asked,
    )
