"""Clean up after a backward that has raised, of whichever engine's model it was."""

import functools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakSet

import torch

from torchacc.engines.patches import torch_patches


class Backward(Protocol):
    """What takes part in the backward of a model."""

    def end_failed_backward(self, *, accumulates: bool) -> None:
        """Clean up after a backward that has raised, of this model or of another.

        Args:
            accumulates: Whether it was a `backward()`, which adds to the gradients of parameters.
        """


_taking_part: WeakSet[Backward] = WeakSet()


def clean_up_after(backward: Backward) -> None:
    """Call `end_failed_backward()` of what takes part in a model's backward as soon as one raises."""
    _taking_part.add(backward)
    _patch()


@functools.cache
def _patch() -> None:
    torch_patches.hold_until_exit(torch_patches.runs_of_graphs(_run_graph))


def _run_graph(original: Callable[..., Any], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
    try:
        return original(*args, accumulate_grad=accumulate_grad, **kwargs)
    except BaseException:
        if torch._C._current_graph_task_id() == -1:  # else the backward that this one is a part of fails, too
            for backward in _taking_part:
                backward.end_failed_backward(accumulates=accumulate_grad)
        raise
