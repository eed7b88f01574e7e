"""What experts of transformers compute, with each of them computing all tokens: shapes do not depend on the data.

Of a token that has not chosen an expert only zeros go through its activation, so that nothing of it reaches a loss or a
gradient, also where its first matmul overflows.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torchacc.engines.patches.split_heads import in_autocast_dtype
from torchacc.engines.patches.versions import is_for_installed

COPYING = "batched_mm"
"""Transformers' way of computing experts that copies the weights of each token's experts, for each token."""


@contextmanager
def without_copies() -> Iterator[None]:
    """Context manager in which experts compute all tokens where `batched_mm` would copy more weights than there are."""
    moe = sys.modules.get("transformers.integrations.moe")  # which a model with experts has imported
    if moe is None or not is_for_installed("dense_experts"):
        yield
        return
    functions: Any = moe.ALL_EXPERTS_FUNCTIONS
    copying = functions[COPYING]
    functions[COPYING] = partial(_compute, copying)
    try:
        yield
    finally:
        functions[COPYING] = copying


def _compute(
    copying: Callable[..., torch.Tensor],
    experts: Any,
    hidden_states: torch.Tensor,  # these have transformers' names, by which they may be given
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Compute experts as transformers asks for it, in the way that takes less memory; `copying` is its own."""
    sums_outputs = not getattr(experts, "has_post_expert_norm", False)  # else they must exist one by one
    if top_k_index.numel() <= experts.num_experts or not sums_outputs:
        return copying(experts, hidden_states, top_k_index, top_k_weights)
    is_chosen, weights = shares(experts.num_experts, top_k_index, top_k_weights)
    output = compute_all(experts, hidden_states, is_chosen, weights, lambda hidden: hidden)
    return output.to(hidden_states.dtype)


def shares(num_experts: int, chosen: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each token has chosen each expert, and with which weight, both of shape (tokens, experts).

    Args:
        num_experts: How many there are.
        chosen: Which experts each token has, of shape (tokens, experts per token).
        weights: With which weights, of the same shape.
    """
    is_chosen = chosen[:, :, None] == torch.arange(num_experts, device=chosen.device)
    return is_chosen.any(1), torch.where(is_chosen, weights[:, :, None], 0.0).sum(1)


def compute_all(
    experts: Any,
    tokens: torch.Tensor,
    is_chosen: torch.Tensor,
    weights: torch.Tensor,
    constrain: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of what experts make of tokens, of shape (tokens, width).

    Args:
        experts: The module.
        tokens: Of shape (tokens, width).
        is_chosen: Whether a token has chosen an expert, of shape (tokens, experts).
        weights: With which weight, of the same shape.
        constrain: Returns activations, of shape (tokens, experts, …), where they are to be computed.
    """
    up, down = ("th,ehi->tei", "tei,eih->th") if experts.is_transposed else ("th,eih->tei", "tei,ehi->th")
    has_gate = getattr(experts, "has_gate", True)
    first, activate = ("gate_up_proj", experts._apply_gate) if has_gate else ("up_proj", experts.act_fn)
    hidden = constrain(torch.einsum(up, *in_autocast_dtype(tokens, getattr(experts, first))))
    if experts.has_bias:
        hidden = hidden + getattr(experts, f"{first}_bias").to(hidden.dtype)
    hidden = activate(torch.where(is_chosen[:, :, None], hidden, 0.0))
    # Weighed before the matmul, so that it sums over experts, too, and their outputs need not exist one by one.
    output = torch.einsum(down, *in_autocast_dtype(constrain(hidden * weights[:, :, None]), experts.down_proj))
    if experts.has_bias:
        output = output + torch.einsum("te,eh->th", *in_autocast_dtype(weights, experts.down_proj_bias))
    return output
