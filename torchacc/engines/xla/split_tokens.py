"""Linear layers and attention that keep tokens split over devices along their length.

XLA is right without, but PyTorch joins the dimensions of samples and tokens into one for a linear layer, which XLA
cannot split as the two were split, and would gather the activations of all tokens in every layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchacc.engines.patches.split_heads import ATTENTION, in_autocast_dtype


class TokensStaySplit(TorchFunctionMode):
    """While entered, linear layers compute each device's tokens; attention gathers keys and values, not queries."""

    def __init__(self, place: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        """Take the function that places a tensor of shape (batch, heads, tokens, size).

        Args:
            place: Returns the tensor with a part of the tokens on each device, if its second argument is true, or all.
        """
        super().__init__()
        self._place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch."""
        kwargs = kwargs or {}
        if func is F.linear and len(args) > 1 and args[0].dim() > 2 and args[1].dim() == 2:
            return _linear(*args, **kwargs)
        if func is not ATTENTION or len(args) < 3 or any(tensor.dim() != 4 for tensor in args[:3]):
            return func(*args, **kwargs)
        query, key, value, *others = args
        key, value = (self._place(self._place(tensor, True), False) for tensor in (key, value))
        return self._place(func(self._place(query, True), key, value, *others, **kwargs), True)


def _linear(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = _Product.apply(*in_autocast_dtype(tokens, weight))
    return product if bias is None else product + in_autocast_dtype(bias)[0]


class _Product(torch.autograd.Function):
    """The product of tokens (…, in) and a weight (out, in), by operations that keep the tokens' dimensions apart."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        return torch.einsum("...i,oi->...o", tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        tokens, weight = ctx.saved_tensors
        of_tokens = torch.einsum("...o,oi->...i", gradient, weight) if ctx.needs_input_grad[0] else None
        of_weight = torch.einsum("...o,...i->oi", gradient, tokens) if ctx.needs_input_grad[1] else None
        return of_tokens, of_weight
