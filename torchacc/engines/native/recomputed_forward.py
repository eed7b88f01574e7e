"""Recompute by PyTorch's non-reentrant checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from torchacc.engines import recompute


def checkpointed(module: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a module's forward, and have it computed again in backward, where its norms count no batch a second time."""
    has_run = False

    def run(*args: Any) -> Any:
        nonlocal has_run
        again, has_run = has_run, True
        with recompute.statistics_kept(module) if again else nullcontext():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False)
