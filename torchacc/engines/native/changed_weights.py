"""Recompute of modules whose weights are still those of their forward."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchacc.engines.recompute import Checkpoint
from torchacc.errors import EngineError


def refuse_changed_weights(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that raises where a module would be computed again with other weights than at first.

    Autograd notices weights that are written to by what it has saved of them; of a module that is computed again it has
    saved nothing.
    """

    def run(module: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first: list[tuple[int, bool]] | None = None

        def checked(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            if not torch.compiler.is_compiling():
                weights = [(parameter._version, parameter.requires_grad) for parameter in module.parameters()]
                if first is not None and weights != first:
                    raise EngineError(
                        f"a weight of {type(module).__name__} has changed, or was frozen, between the module's forward "
                        "and backward, in which memory.gc computes it again: gradients would be those of neither. "
                        "Change weights after backward(), or set config.memory.gc = False"
                    )
                first = weights
            return forward(*args, **kwargs)

        return checkpoint(module, checked, args, kwargs)

    return run
