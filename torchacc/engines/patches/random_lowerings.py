"""Dropout and random masks of which each device computes its own part, from `counter_random.py`."""

from collections.abc import Callable
from typing import Any

import torch

from torchacc.engines.patches import counter_random


class _Dropout(torch.autograd.Function):
    """Keeps a mask for backward, which XLA computes again there from the place of each element."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probability: float) -> torch.Tensor:
        kept = counter_random.bernoulli(x.shape, 1 - probability, x.device)
        ctx.save_for_backward(kept)
        ctx.scale = 1 / (1 - probability) if probability < 1 else 0.0
        return _scaled(x, kept, ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return _scaled(gradient, kept, ctx.scale), None


def _scaled(x: torch.Tensor, kept: torch.Tensor, scale: float) -> torch.Tensor:
    """Return what is kept, and zeros; a NaN stays one everywhere, as in PyTorch, for which `where()` would not do."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (x.to(dtype) * (kept.to(dtype) * scale)).to(x.dtype)


def _dropout(x: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    if not 0 <= probability <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {probability}")
    if not training or not probability or not x.numel():
        return x
    if not (x.is_floating_point() or x.is_complex()):
        raise RuntimeError(f"dropout of {x.dtype}, which has no fractions: it takes numbers with a floating point")
    dropped: torch.Tensor = _Dropout.apply(x, probability)
    return dropped


def _native_dropout(
    original: Callable[..., Any], x: torch.Tensor, probability: float, training: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if training is False or not 0 < probability < 1:
        return original(x, probability, training)  # type: ignore[no-any-return]
    kept = counter_random.bernoulli(x.shape, 1 - probability, x.device)
    return _scaled(x, kept, 1 / (1 - probability)), kept


def _bernoulli_of_one(
    original: Callable[..., Any], x: torch.Tensor, p: float = 0.5, *, generator: Any = None
) -> torch.Tensor:
    if generator is not None:
        return original(x, p, generator=generator)  # type: ignore[no-any-return]
    return counter_random.bernoulli(x.shape, p, x.device).to(x.dtype)


def _bernoulli_of_each(original: Callable[..., Any], p: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
    if generator is not None:
        return original(p, generator=generator)  # type: ignore[no-any-return]
    return (counter_random.uniform(p.shape, p.device) < p).to(p.dtype)


def _bernoulli_like(
    original: Callable[..., Any], x: torch.Tensor, p: torch.Tensor, *, generator: Any = None
) -> torch.Tensor:
    if generator is not None:
        return original(x, p, generator=generator)  # type: ignore[no-any-return]
    return (counter_random.uniform(x.shape, x.device) < p.to(x.device)).to(x.dtype)


DROPOUT: dict[str, Callable[..., Any]] = {"dropout": _dropout}
AROUND_RANDOM: dict[str, Callable[..., Any]] = {
    "native_dropout": _native_dropout,
    "bernoulli.p": _bernoulli_of_one,
    "bernoulli.Tensor": _bernoulli_like,
    "bernoulli": _bernoulli_of_each,
}
"""Their first argument is torch_xla's, which a generator of its own is left to."""
