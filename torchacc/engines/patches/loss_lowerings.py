"""The cross entropy of classes, which torch_xla computes with a row of zeros and a one for each sample."""

from collections.abc import Callable
from typing import Any

import torch

from torchacc.engines.patches.extreme_lowerings import nan_shows_anyway

_MEAN, _SUM = 1, 2
"""PyTorch's numbers of `reduction`."""


def _cross_entropy(
    original: Callable[..., Any],
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the loss of classes by number; torch_xla's goes through all logits three times more.

    It sums up the ones of all samples, in forward and in backward, and the products of ones and logarithms in a pass of
    their own. What a logit contributes to the loss is the same number here.
    """
    is_plain = x.dim() == 2 and x.dtype == torch.float32 and target.dtype == torch.int64 and x.numel() > 0
    if not is_plain or target.shape != x.shape[:1] or weight is not None or label_smoothing or not reduction:
        return original(x, target, weight, reduction, ignore_index, label_smoothing)  # type: ignore[no-any-return]
    loss: torch.Tensor = _LossOfClasses.apply(x, target, reduction, ignore_index)
    return loss


class _LossOfClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.Tensor, reduction: int, ignore_index: int) -> torch.Tensor:
        counted = (target != ignore_index) & (target >= 0) & (target < x.shape[1])
        with nan_shows_anyway():
            highest = x.max(1, keepdim=True).values
        shifted = x - highest
        total = shifted.exp().sum(1).log()
        # Two sums of one shape over the same logits, which XLA makes in one pass.
        of_target = torch.where(_is_target(x, target), shifted, 0.0).sum(1)
        count = counted.sum().to(x.dtype) if reduction == _MEAN else x.new_ones(())
        ctx.save_for_backward(x, target, counted, highest, total, count)
        return torch.where(counted, total - of_target, 0.0).sum() / count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, target, counted, highest, total, count = ctx.saved_tensors
        # A further derivative is that of what is computed from `x` here.
        logs = torch.log_softmax(x, 1) if torch.is_grad_enabled() else (x - highest) - total[:, None]
        share = torch.where(counted, grad / count.clamp(min=1), 0.0)[:, None]
        return (logs.exp() - _is_target(x, target).to(x.dtype)) * share, None, None, None


def _is_target(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return target[:, None] == torch.arange(x.shape[1], device=x.device)


AROUND_LOSSES: dict[str, Callable[..., Any]] = {"cross_entropy_loss": _cross_entropy}
"""By name; their first argument is what there was before."""
