"""Backwards in two passes: what the stage before waits for at once, the gradients of linear layers' weights later.

A linear layer needs two matmuls in backward. That for its input goes on through the graph; that for its weight is kept
here until a schedule has time for it, as in Qi et al., "Zero Bubble Pipeline Parallelism" (https://arxiv.org/abs/2401.10241).
Until then the layer's input and the gradient of its output stay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchacc.errors import EngineError


class SplitBackward:
    """The gradients of weights that the backwards of a model have left for later.

    Args:
        model: Its linear layers get another forward. Weights that are split over devices, and those of layers whose
            forward is not PyTorch's, or transformers', own, still get their gradients at once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._left: dict[int, list[Callable[[], None]]] = {}
        """By the number of the microbatch."""
        self._number: int | None = None
        """That of the microbatch whose backward runs."""
        for module in model.modules():
            if _is_linear(module) and "forward" not in vars(module):
                module.forward = partial(self._run, module, module.forward)

    def clear(self) -> None:
        """Forget what backwards have left, of a batch that was interrupted."""
        self._left.clear()

    @contextmanager
    def splitting(self, number: int) -> Iterator[None]:
        """Context manager in which the backward of a microbatch leaves gradients for `compute()`.

        Args:
            number: The number of the microbatch.
        """
        self._left[number], self._number = [], number
        try:
            yield
        finally:
            self._number = None

    @torch.no_grad()
    def compute(self, number: int) -> None:
        """Compute what the backward of a microbatch has left.

        Args:
            number: The number of the microbatch.
        """
        for add_gradients in self._left.pop(number):
            add_gradients()

    def leave(self, add_gradients: Callable[[], None]) -> bool:
        """Keep a function for later, if the backward that runs may be split; return whether it may."""
        if self._number is not None:
            self._left[self._number].append(add_gradients)
        return self._number is not None

    def _run(self, module: Any, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand for the forward of a linear layer."""
        if kwargs or len(args) != 1 or not torch.is_grad_enabled() or not _is_pytorchs_own(module):
            return forward(*args, **kwargs)
        inputs, weight = args[0], module.weight
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        # A weight that is something else than a parameter is a function of one, or a distributed one.
        if type(weight) is not nn.Parameter or not weight.requires_grad or weight.dtype != inputs.dtype:
            return forward(inputs)
        output: torch.Tensor = _Linear.apply(self, inputs, weight, module.bias, not isinstance(module, nn.Linear))
        return output


class _Linear(torch.autograd.Function):
    """A linear layer whose weight may get its gradient later."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: SplitBackward,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        is_transposed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.how = owner, (weight, bias), is_transposed  # themselves: what is saved may come back as a copy
        return F.linear(inputs, weight.T if is_transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        owner, parameters, is_transposed = ctx.how
        _, of_inputs, of_weight, of_bias, _ = ctx.needs_input_grad
        returned = grad @ (weight.T if is_transposed else weight) if of_inputs else None

        def gradients() -> tuple[torch.Tensor | None, torch.Tensor | None]:
            rows, columns = grad.reshape(-1, grad.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
            left, right = (columns, rows) if is_transposed else (rows, columns)
            return left.T @ right if of_weight else None, rows.sum(0) if of_bias else None

        version = grad._version

        def add_gradients() -> None:
            if grad._version != version:
                raise EngineError(
                    "a hook has written to a gradient that a linear layer's weight still needs, with "
                    "config.dist.pp.schedule = 'zero_bubble': return a new gradient from the hook, or set schedule = "
                    "'1f1b'"
                )
            for parameter, gradient in zip(parameters, gradients(), strict=True):
                if gradient is not None:
                    _add(parameter, gradient)

        if owner.leave(add_gradients):
            return None, returned, None, None, None
        return None, returned, *gradients(), None


def _add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a parameter's gradient, as a backward does in its end."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, or transformers' of GPT-2, whose weight is transposed."""
    return (type(module).__module__, type(module).__name__) in _LINEAR


def _is_pytorchs_own(module: nn.Module) -> bool:
    """Return whether a linear layer computes what its class does, which a script may have changed for all layers."""
    is_patched = type(module).forward.__module__ != type(module).__module__ or F.linear is not torch._C._nn.linear
    return not is_patched and not torch._C._len_torch_function_stack()


_LINEAR = (("torch.nn.modules.linear", "Linear"), ("transformers.pytorch_utils", "Conv1D"))
