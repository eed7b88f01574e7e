"""Losses where each device has a process of its own: their means over all devices, and sums that would be scaled."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from torchacc.data.tree import map_tensors, tensors_in
from torchacc.logging import get_logger

_log = get_logger(__name__)

_kept: ContextVar[bool] = ContextVar("kept_by_devices", default=False)
_weighed: ContextVar[bool] = ContextVar("weighed", default=False)


@contextmanager
def local_losses() -> Iterator[None]:
    """Context manager, or decorator of a function, in which scalars that models return are each device's own."""
    with _set(_kept):
        yield


@contextmanager
def weighed() -> Iterator[None]:
    """Context manager, or decorator of a function, that weighs the losses that models return by their labels."""
    with _set(_weighed):
        yield


@contextmanager
def _set(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


def are_weighed() -> bool:
    """Return whether losses that models return are weighed by their labels now."""
    return _weighed.get()


def average_scalars(output: Any, mean: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Give the scalars that a model returns the values of their means over all devices.

    Inside of `local_losses()` they keep their own.

    Args:
        output: The model's output, of any nesting. Its scalars are the floating-point tensors without dimensions.
        mean: Averages a tensor of shape (scalars,), in float64, over the devices.
    """
    if _kept.get():
        return output

    def is_scalar(tensor: torch.Tensor) -> bool:
        return not tensor.dim() and tensor.is_floating_point()

    scalars = [tensor for tensor in tensors_in(output) if is_scalar(tensor)]
    if not scalars:
        return output
    device = scalars[0].device
    means = iter(mean(torch.stack([scalar.detach().to(device).double() for scalar in scalars])))
    return map_tensors(lambda tensor: MeanLoss.apply(tensor, next(means)) if is_scalar(tensor) else tensor, output)


def mean_of_closure(closure: Callable[[], Any], mean: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
    """Return a closure that gives the mean of what each device's gives.

    An optimizer that decides by the loss, as a line search does, would go another way on each device.

    Args:
        closure: Returns a loss, as a tensor or a number, or None.
        mean: Averages a tensor of shape (scalars,), in float64, over the devices.
    """

    @functools.wraps(closure)
    def averaged() -> Any:
        loss = closure()
        if isinstance(loss, float):
            return mean(torch.tensor([loss], dtype=torch.float64)).item()
        return average_scalars(loss, mean)

    return averaged


class MeanLoss(torch.autograd.Function):
    """Give a loss the value of its mean over all devices, and its own gradient.

    The gradients are averaged over the devices as well, so that they are those of the mean.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the mean in place of the device's own loss."""
        return mean.to(loss).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass the gradient on to the device's own loss."""
        return grad, None


def warn_of_sums(model: nn.Module, output: Any, inputs: Any, data_parallel_size: int) -> None:
    """Warn of a loss that is a sum over the process's own samples, where gradients are averaged over devices.

    Args:
        model: The model, in training.
        output: What it has returned.
        inputs: What it was called with.
        data_parallel_size: The devices that see different data.
    """
    rows = next((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), 0)
    if rows and any(is_sum_over(rows, tensor) for tensor in tensors_in(output) if not tensor.dim()):
        _log.warning(
            "the loss that this %s returns is a sum over samples. With a process for each device gradients are "
            "averaged over the %d devices that see different data, so that the loss and its gradients are 1/%d of "
            "those of all samples: return a mean, or multiply the sum by %d",
            type(model).__name__,
            *[data_parallel_size] * 3,
        )


_SUM = 2
"""What PyTorch's losses note of `reduction="sum"`."""
_PASSED_ON = ("Alias", "Clone", "MeanLoss", "Neg", "Reshape", "Squeeze", "ToCopy", "Unsqueeze", "View")


def is_sum_over(rows: int, loss: torch.Tensor) -> bool:
    """Return whether a tensor without dimensions is nothing but a sum over rows, or such a sum and something more.

    One that is multiplied or divided may be a mean that is made by hand.

    Args:
        rows: The batch's rows.
        loss: The tensor.
    """
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if getattr(node, "_saved_reduction", None) == _SUM:
            return True
        name = node.name()
        if name == "SumBackward0":
            size = node._saved_self_sym_sizes
            if len(size) > 0 and size[0] > 1 and _has_rows(int(size[0]), rows, node.next_functions[0][0]):
                return True
        elif name.startswith(("Add", "Sub", *_PASSED_ON)):
            nodes += [following for following, _ in node.next_functions]
    return False


def _has_rows(size: int, rows: int, summed: Any) -> bool:
    """Return whether what is summed has one or several elements for each row.

    Args:
        size: The size of its first dimension.
        rows: The batch's rows.
        summed: What autograd knows of it. A stack may be of the losses of layers, as many as there are.
    """
    is_stack = summed is not None and summed.name() == "StackBackward0"
    return size == rows if is_stack else size % rows == 0
