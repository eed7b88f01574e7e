"""The dtype that a model computes in, whatever autocast a script has around it."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from torchacc.engines.patches import torch_patches
from torchacc.logging import get_logger

_log = get_logger(__name__)


def autocast_to(dtype: torch.dtype | None, device: str) -> torch.autocast:
    """Return a context in which a device computes in a dtype; None is that of the parameters.

    A script's own autocast, which has no effect in it, is warned of once; nor has it in a backward from then on.
    """
    if torch.is_autocast_enabled(device):
        _keep_out_of_backward()
        if torch.get_autocast_dtype(device) != dtype:
            _warn(torch.get_autocast_dtype(device))
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None)


@functools.cache
def _warn(asked: torch.dtype) -> None:
    _log.warning(
        "torch.autocast(dtype=%s) around a model has no effect inside of it: config.compute.bf16 and "
        "config.compute.fp16 choose what it computes in",
        asked,
    )


@functools.cache
def _keep_out_of_backward() -> None:
    """Run backwards inside of a script's autocast in the dtypes of their forwards, until the process ends."""
    torch_patches.hold_until_exit(torch_patches.runs_of_graphs(_run_without_autocast))


def _run_without_autocast(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for device in {"cpu", "cpu" if accelerator is None else accelerator.type}:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return run(*args, **kwargs)
