"""What experts of transformers compute, with each of them computing all tokens: shapes do not depend on the data.

Of a token that has not chosen an expert only zeros go through its activation, so that nothing of it reaches a loss or a
gradient, also where its first product overflows.
"""

from collections.abc import Callable
from typing import Any

import torch

from torchacc.engines.patches.split_heads import in_autocast_dtype


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
    lay: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the weighted sum of what experts make of tokens, of shape (tokens, width).

    Args:
        experts: The module.
        tokens: Of shape (tokens, width).
        is_chosen: Whether a token has chosen an expert, of shape (tokens, experts).
        weights: With which weight, of the same shape.
        lay: Returns activations, of shape (tokens, experts, …), where they are to be computed.
    """
    up, down = ("th,ehi->tei", "tei,eih->th") if experts.is_transposed else ("th,eih->tei", "tei,ehi->th")
    hidden = lay(torch.einsum(up, *in_autocast_dtype(tokens, experts.gate_up_proj)))
    if experts.has_bias:
        hidden = hidden + experts.gate_up_proj_bias.to(hidden.dtype)
    hidden = experts._apply_gate(torch.where(is_chosen[:, :, None], hidden, 0.0))
    # Weighed before the product, so that it sums over experts, too, and their outputs need not exist one by one.
    output = torch.einsum(down, *in_autocast_dtype(lay(hidden * weights[:, :, None]), experts.down_proj))
    if experts.has_bias:
        output = output + torch.einsum("te,eh->th", *in_autocast_dtype(weights, experts.down_proj_bias))
    return output
