"""`scaled_dot_product_attention()` without a value for each pair of tokens, in plain operations.

Queries go block after block: a block's scores are there while its output is computed, and again in backward, from the
queries, the keys, and the largest score and sum of each row ("Self-attention Does Not Need O(n^2) Memory", Rabe and
Staats, 2021; the gradients are those of FlashAttention, Dao et al., 2022). Under a causal mask a block takes the keys
up to its own last token alone, which is half of the work.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchacc.engines.patches import counter_random
from torchacc.engines.patches.split_heads import masked
from torchacc.errors import EngineError

BLOCK = 256
"""Queries of a block."""


def replace(original: Callable[..., torch.Tensor], *, takes_dropout: bool = True) -> Callable[..., torch.Tensor]:
    """Return a function in place of PyTorch's, which is left what has another form or a mask that needs a gradient.

    Args:
        original: PyTorch's function.
        takes_dropout: Whether it is not left attention with dropout.
    """

    @functools.wraps(original)
    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        fits = have_known_shapes(query, key, value, enable_gqa) and _is_known_mask(attn_mask, query, key)
        is_left = dropout_p >= 1 or (dropout_p and not takes_dropout)
        if not fits or is_left or (is_causal and attn_mask is not None):
            others = {"scale": scale, "enable_gqa": enable_gqa}
            return original(query, key, value, attn_mask, dropout_p, is_causal, **others)
        grouped = query.unflatten(1, (key.shape[1], -1))
        options = _Options(query.shape[-1] ** -0.5 if scale is None else scale, is_causal, dropout_p)
        output: torch.Tensor = _Attention.apply(grouped, key, value, _grouped(attn_mask, query, key), options)
        return output.flatten(1, 2)

    return attention


@dataclass(frozen=True)
class _Options:
    scale: float
    is_causal: bool
    dropout: float
    """The share of weights that is dropped, on XLA's devices only."""

    def draw_key(self, device: torch.device) -> list[torch.Tensor]:
        """Return what a block's mask is made from, if there is one."""
        return [counter_random.draw_key(device)] if self.dropout else []

    def dropped(self, weights: torch.Tensor, key: list[torch.Tensor]) -> torch.Tensor:
        """Return weights of which some are dropped, by the mask of a key; it is its own derivative."""
        if not key:
            return weights
        kept = counter_random.mask(key[0], weights.shape, 1 - self.dropout)
        return weights * (kept.to(weights.dtype) / (1 - self.dropout))


def have_known_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    """Return whether tensors are samples of heads of tokens, whose shapes go together as PyTorch asks for it."""
    if any(each.dim() != 4 for each in (query, key, value)) or key.shape[:3] != value.shape[:3]:
        return False
    heads, kv_heads = query.shape[1], key.shape[1]
    if query.shape[0] != key.shape[0] or heads % kv_heads or (heads != kv_heads and not enable_gqa):
        return False
    return bool(query.shape[2] and key.shape[2])


def refuse_second_gradients(name: str) -> None:
    """Refuse a backward whose gradients are to have gradients."""
    if torch.is_grad_enabled():
        raise EngineError(
            f"create_graph=True with {name} attention is not available: gradients of its gradients are not written: "
            "set config.compute.attention = 'sdpa'"
        )


def _is_known_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether a mask broadcasts to all scores, and needs no gradient; of others PyTorch says what is wrong."""
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() > 4 or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return False
    sizes = (*query.shape[:3], key.shape[2])[4 - mask.dim() :]
    return all(found in (1, size) for found, size in zip(mask.shape, sizes, strict=True))


def _grouped(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of five dimensions, some of 1: samples, heads of keys, queries' heads of each, queries, keys."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    is_of_each_head = mask.shape[1] == query.shape[1] > 1
    return mask.unflatten(1, (key.shape[1], -1)) if is_of_each_head else mask.unsqueeze(2)


@dataclass
class _Block:
    """Some of the queries."""

    queries: slice
    num_keys: int
    """The first of them, which it sees at most."""


def _blocks(num_queries: int, num_keys: int, is_causal: bool) -> Iterator[_Block]:
    for start in range(0, num_queries, BLOCK):
        stop = min(start + BLOCK, num_queries)
        yield _Block(slice(start, stop), min(stop, num_keys) if is_causal else num_keys)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: _Options,
    ) -> torch.Tensor:
        outputs, highest, sums, keys = [], [], [], []
        for block in _blocks(query.shape[3], key.shape[2], options.is_causal):
            scores, hidden = _scores(query, key, mask, options, block)
            top = scores.amax(-1, keepdim=True)
            weights = _without(torch.exp(scores - top), hidden)
            total = weights.sum(-1, keepdim=True)
            keys.append(options.draw_key(query.device))
            # A token that sees none gets zeros, as from PyTorch.
            shares = weights / total.clamp(min=torch.finfo(total.dtype).tiny)
            dropped = options.dropped(shares, keys[-1]).to(value.dtype)
            outputs.append(torch.einsum("bkgqt,bktd->bkgqd", dropped, value[:, :, : block.num_keys]).to(query.dtype))
            highest.append(top)
            sums.append(total)
        output = torch.cat(outputs, 3)
        tensors = [output, torch.cat(highest, 3), torch.cat(sums, 3), query, key, value]
        ctx.save_for_backward(*tensors, *([] if mask is None else [mask]), *(key for found in keys for key in found))
        ctx.options, ctx.has_mask = options, mask is not None
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_gradients("blockwise")
        output, highest, sums, query, key, value, *others = _after(gradient, list(ctx.saved_tensors))
        mask = others.pop(0) if ctx.has_mask else None
        wide = highest.dtype
        along = (gradient.to(wide) * output.to(wide)).sum(-1, keepdim=True)
        of_query, of_key, of_value = [], [], []
        for block in _blocks(query.shape[3], key.shape[2], ctx.options.is_causal):
            rows, columns = (..., block.queries, slice(None)), (..., slice(block.num_keys), slice(None))
            scores, hidden = _scores(query, key, mask, ctx.options, block)
            total = sums[rows].clamp(min=torch.finfo(wide).tiny)
            weights = _without(torch.exp(scores - highest[rows]), hidden) / total
            of_output = gradient[rows].to(value.dtype)
            random = [others.pop(0)] if others else []
            dropped = ctx.options.dropped(weights, random).to(value.dtype)
            of_value.append(torch.einsum("bkgqt,bkgqd->bktd", dropped, of_output))
            of_weights = torch.einsum("bkgqd,bktd->bkgqt", of_output, value[columns]).to(wide)
            of_weights = ctx.options.dropped(of_weights, random)
            of_scores = (weights * (of_weights - along[rows]) * ctx.options.scale).to(key.dtype)
            of_query.append(torch.einsum("bkgqt,bktd->bkgqd", of_scores, key[columns]))
            of_key.append(torch.einsum("bkgqt,bkgqd->bktd", of_scores, query[rows]))
        return torch.cat(of_query, 3), _summed(of_key, key), _summed(of_value, value), None, None


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, options: _Options, block: _Block
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a block's scores, at least in float32, and what of them is hidden; None for nothing."""
    wide = torch.promote_types(query.dtype, torch.float32)
    some = query[..., block.queries, :]
    scores = torch.einsum("bkgqd,bktd->bkgqt", some, key[:, :, : block.num_keys]).to(wide) * options.scale
    if mask is not None:
        part = mask if mask.shape[-1] == 1 else mask[..., : block.num_keys]
        return masked(scores, part if mask.shape[-2] == 1 else part[..., block.queries, :])
    if options.is_causal and block.num_keys > block.queries.start + 1:
        places = [torch.arange(size, device=query.device) for size in (block.queries.stop, block.num_keys)]
        return masked(scores, places[1][None, :] <= places[0][block.queries, None])
    return scores, None


def _without(weights: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    return weights if hidden is None else weights.masked_fill(hidden, 0.0)


def _summed(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of gradients for the first keys, at least in float32 while it is summed up."""
    wide = torch.promote_types(like.dtype, torch.float32)
    sums = torch.zeros((), dtype=wide, device=like.device)
    for part in parts:
        sums = sums + torch.nn.functional.pad(part.to(wide), (0, 0, 0, like.shape[2] - part.shape[2]))
    return sums.to(like.dtype)


def _after(gradient: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors that wait for a gradient: XLA would find forward's scores among backward's, and keep them."""
    if gradient.device.type != "xla":
        return tensors
    import torch_xla.core.xla_model as xm

    copies = [tensor.clone() for tensor in tensors]
    xm.optimization_barrier_([*copies, gradient.clone()])
    return copies
