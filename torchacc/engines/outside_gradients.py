"""Compares, in the first steps, the gradients of parameters that a script trains beside a sharded model.

Nobody averages those over the processes: from rows of its own, each process would train others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torchacc.engines.base import Engine
from torchacc.engines.sharded_model import HANDLE
from torchacc.errors import EngineError
from torchacc.logging import get_logger

_log = get_logger(__name__)

_STEPS = 2
"""How many steps of an optimizer are looked at."""
_TOLERANCE = 1e-4
"""By how much numbers may differ that are the same but for rounding."""

Numbers = list[float] | None
"""The sum and the norm of a gradient; None where there is none."""


@dataclass
class _Noted:
    """What the optimizers have stepped with that hold no parameter of a sharded model."""

    left: WeakKeyDictionary[torch.optim.Optimizer, int] = field(default_factory=WeakKeyDictionary)
    """How many steps of each are still looked at."""
    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    """Of each step since the last comparison."""


_noted = _Noted()


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Record the gradients that an optimizer steps with which holds no parameter of a sharded model."""
    left = _noted.left.setdefault(optimizer, _STEPS)
    if left and len(_noted.gradients) < _STEPS:
        _noted.left[optimizer] = left - 1
        _noted.gradients.append(_summaries(optimizer))


def compare(optimizer: torch.optim.Optimizer, engine: Engine) -> None:
    """Compare an optimizer's gradients of what is in no sharded model, and those noted. Collective: every process.

    Args:
        optimizer: One that is about to step, and holds parameters of a sharded model.
        engine: The engine of that model.

    Raises:
        EngineError: The gradients of this optimizer are others than on another process.
    """
    steps = [_summaries(optimizer), *_noted.gradients]
    _noted.gradients.clear()
    found: list[list[list[Numbers]]] = engine.group.all_gather_objects(_read(steps, engine))
    if any(len(each) != len(steps) for each in found):  # some processes alone train something
        return
    for index, of_step in enumerate(zip(*found, strict=True)):
        if _differ(of_step):
            said = (
                "an optimizer steps with parameters that are in no model of accelerate(), and each process has other "
                "gradients of them, from its own rows: each would train another. Make them a part of the model before "
                "accelerate() (model.head = head), or average them after each backward: "
                "parameter.grad = torchacc.dist.all_gather(parameter.grad[None]).mean(0)"
            )
            if not index:
                raise EngineError(said)
            _log.warning("%s", said)
            return


def _summaries(optimizer: torch.optim.Optimizer) -> list[torch.Tensor | None]:
    """Return the sum and the norm of each gradient of a parameter that is in no sharded model."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    outside = (each for each in parameters if HANDLE not in vars(each))
    return [_summary(each.grad) for each in outside]


@torch.no_grad()
def _summary(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or gradient.layout is not torch.strided or hasattr(gradient, "to_local"):
        return None
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return torch.stack([values.float().sum(), values.float().norm()])


def _read(steps: Sequence[Sequence[torch.Tensor | None]], engine: Engine) -> list[list[Numbers]]:
    """Return the numbers on the host, in one transfer."""
    scalars = [number for each in chain.from_iterable(steps) if each is not None for number in each.unbind()]
    values = iter(engine.read_scalars(scalars))
    return [[None if each is None else [next(values), next(values)] for each in step] for step in steps]


def _differ(steps: Sequence[list[Any]]) -> bool:
    """Return whether the processes have other gradients of the same parameters."""
    if len({len(step) for step in steps}) > 1:
        return False
    for gradients in zip(*steps, strict=True):
        if None in gradients or not all(math.isfinite(number) for each in gradients for number in each):
            continue
        norm = max(each[1] for each in gradients)
        if any(abs(a - b) > _TOLERANCE * norm for each in gradients for a, b in zip(each, gradients[0], strict=True)):
            return True
    return False
