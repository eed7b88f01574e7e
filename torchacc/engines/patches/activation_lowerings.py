"""Activation functions that torch_xla computes in another way than PyTorch, or whose gradient it does."""

from collections.abc import Callable

import torch


def _elu(x: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> torch.Tensor:
    """Return the ELU, of which SELU is a case; torch_xla's gradient of it is another one."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    negative = torch.expm1(torch.where(wide > 0, 0, wide) * input_scale) * (alpha * scale)
    return torch.where(wide > 0, wide * scale, negative).to(x.dtype)


def _elu_(x: torch.Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> torch.Tensor:
    return x.copy_(_elu(x.clone(), alpha, scale, input_scale))


def _celu(x: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    return _elu(x, alpha, 1, 1 / alpha)


def _celu_(x: torch.Tensor, alpha: float = 1) -> torch.Tensor:
    return _elu_(x, alpha, 1, 1 / alpha)


def _hardtanh(x: torch.Tensor, min_val: float = -1, max_val: float = 1) -> torch.Tensor:
    """Cut values off, as ReLU6 does; torch_xla's gradient at the bounds themselves, such as 0, is 1 and not 0."""
    is_cut = (x <= min_val) | (x >= max_val)  # not so a NaN, which clamp() would lose
    return torch.where(is_cut, x.detach().clamp(min_val, max_val), x)


def _hardtanh_(x: torch.Tensor, min_val: float = -1, max_val: float = 1) -> torch.Tensor:
    return x.copy_(_hardtanh(x.clone(), min_val, max_val))


def _hardsigmoid(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (_hardtanh(wide + 3, 0, 6) / 6).to(x.dtype)


def _hardsigmoid_(x: torch.Tensor) -> torch.Tensor:
    return x.copy_(_hardsigmoid(x.clone()))


def _hardswish(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    inside = torch.where(wide < 3, wide * (wide + 3) / 6, wide)
    return torch.where(wide <= -3, 0, inside).to(x.dtype)


def _hardswish_(x: torch.Tensor) -> torch.Tensor:
    return x.copy_(_hardswish(x.clone()))


def _threshold(x: torch.Tensor, threshold: float, value: float) -> torch.Tensor:
    """Put a value in the place of those that are not above a threshold; torch_xla's does so with a NaN, too."""
    return torch.where(x <= threshold, value, x).to(x.dtype)


def _threshold_backward(grad: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    return torch.where(x <= threshold, 0, grad).to(grad.dtype)


def _softshrink(x: torch.Tensor, by: float = 0.5) -> torch.Tensor:
    """Move values towards 0; torch_xla takes a NaN for one that gets there."""
    moved = torch.where(x > by, x - by, x + by)
    return torch.where(x.abs() <= by, 0, moved).to(x.dtype)


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "elu": _elu,
    "elu_": _elu_,
    "celu": _celu,
    "celu_": _celu_,
    "hardtanh": _hardtanh,
    "hardtanh_": _hardtanh_,
    "hardsigmoid": _hardsigmoid,
    "hardsigmoid_": _hardsigmoid_,
    "hardswish": _hardswish,
    "hardswish_": _hardswish_,
}
"""By name; of differentiable operations, so that autograd's part of each follows."""

WITH_NAN: dict[str, Callable[..., torch.Tensor]] = {
    "threshold": _threshold,
    "threshold_backward": _threshold_backward,
    "softshrink": _softshrink,
}
"""By name; of which PyTorch's autograd stays as it is."""
