"""Attention whose heads stay split over devices.

PyTorch multiplies stacks of matrices with their batch and head dimensions joined into one. XLA cannot split that one as
the two were split, and would gather the activations of all heads in every layer; a matmul that keeps the two apart
needs no communication.
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

ATTENTION = F.scaled_dot_product_attention  # which `model_patches.patches()` covers
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class HeadsStayApart(TorchFunctionMode):
    """While entered, products of tensors of shape (batch, heads, rows, columns) keep the first two dimensions apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch, or ours in its place."""
        kwargs = kwargs or {}
        if func in _PRODUCTS and not kwargs and _are_stacks(*args) and args[0].shape[1] == args[1].shape[1]:
            return _product("bhmk,bhkn->bhmn", *args)
        if func is ATTENTION and _are_stacks(*args[:3]):
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _are_stacks(*tensors: Any) -> bool:
    stacks = [isinstance(tensor, torch.Tensor) and tensor.dim() == 4 for tensor in tensors]
    return bool(stacks) and all(stacks) and len({tensor.shape[0] for tensor in tensors}) == 1


def _product(equation: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = torch.einsum(equation, *in_autocast_dtype(one, other))
    return product


def in_autocast_dtype(*factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the factors of a product in the dtype that autocast gives to matrix products."""
    if not torch.is_autocast_enabled("xla"):
        return factors
    return tuple(factor.to(torch.get_autocast_dtype("xla")) for factor in factors)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return what PyTorch's `scaled_dot_product_attention()` does, softmax in float32."""
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = _product("bhqd,bhkd->bhqk", query, key).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:  # PyTorch takes this or a mask
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        # A row that sees nothing attends to nothing.
        scores, hidden = masked(scores, attn_mask)
        weights = torch.softmax(scores, -1)
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    return _product("bhqk,bhkd->bhqd", weights.to(value.dtype), value)


def masked(scores: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores under a mask, and what is hidden: it is the lowest number, as infinity has no gradient that is one.

    Args:
        scores: Those of each query and key.
        mask: What is seen, of booleans, or what is added; of a shape that broadcasts to the scores'.
    """
    if mask.dtype == torch.bool:
        hidden = mask.logical_not()
    else:
        scores, hidden = scores + mask, mask == float("-inf")
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min), hidden
