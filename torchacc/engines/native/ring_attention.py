"""Causal attention of samples that are split over a ring of devices (Liu et al., 2023), one block of keys at a time.

Keys and values travel from device to device. Each attends from its own queries to those that are there, while the next
ones are on their way, and adds up the outputs by the logarithms of their softmax's sums, as FlashAttention does with
blocks of one device (Dao et al., 2022). So no device ever has the keys and values of more than two.

In backward they travel once more, and the gradients of keys and values with them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from torchacc.parallel.sequence_split import causal_block

_aten = torch.ops.aten
_EFFICIENT_ALIGNMENT = 32
"""To a multiple of how many queries the memory-efficient kernel pads its logarithms."""


@dataclass(frozen=True)
class Ring:
    """The devices that share the tokens of a sample, each with an early and a late chunk of them."""

    size: int
    index: int
    """This device's place among them."""
    pass_on: Callable[[torch.Tensor], Callable[[], torch.Tensor]]
    """Begins to send a tensor to the next device; what it returns waits for the one of the previous device."""


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel of PyTorch's that returns the logarithms of its softmax's sums, too."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]]
    """Takes queries, keys and values of shape (rows, heads, tokens, size), whether they are causal, and the scale."""
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """Takes the output's gradient, queries, keys, values, the output and the logarithms over all keys, what forward
    returned beside, whether they are causal, and the scale."""


def _cpu_forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
    output, logs = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return output, logs, ()


def _cpu_backward(gradient: Any, q: Any, k: Any, v: Any, output: Any, logs: Any, _: Any, *how: Any) -> Any:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(gradient, q, k, v, output, logs, 0.0, how[0], scale=how[1])


def _flash_forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
    output, logs, *more = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return output, logs, tuple(more[:6])


def _flash_backward(gradient: Any, q: Any, k: Any, v: Any, output: Any, logs: Any, more: Any, *how: Any) -> Any:
    *lengths, seed, offset = more
    backward = _aten._scaled_dot_product_flash_attention_backward
    return backward(gradient, q, k, v, output, logs, *lengths, 0.0, how[0], seed, offset, scale=how[1])


def _efficient_forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
    forward = _aten._scaled_dot_product_efficient_attention
    output, logs, *more = forward(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return output, logs[..., : q.shape[2]], tuple(more)


def _efficient_backward(gradient: Any, q: Any, k: Any, v: Any, output: Any, logs: Any, more: Any, *how: Any) -> Any:
    padded = pad(logs, (0, -logs.shape[-1] % _EFFICIENT_ALIGNMENT), value=torch.inf)
    output = output.transpose(1, 2).contiguous().transpose(1, 2)  # as its forward returns it, which is not asked for
    backward, wanted = _aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
    return backward(gradient, q, k, v, None, output, padded, *more, 0.0, wanted, how[0], scale=how[1])[:3]


def _cudnn_forward(q: Any, k: Any, v: Any, is_causal: bool, scale: float) -> Any:
    forward = _aten._scaled_dot_product_cudnn_attention
    output, logs, *more = forward(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return output, logs.squeeze(-1), tuple(more[:6])


def _cudnn_backward(gradient: Any, q: Any, k: Any, v: Any, output: Any, logs: Any, more: Any, *how: Any) -> Any:
    *lengths, seed, offset = more
    backward = _aten._scaled_dot_product_cudnn_attention_backward
    given = (gradient, q, k, v, output, logs.unsqueeze(-1), seed, offset, None)
    return backward(*given, *lengths, 0.0, how[0], scale=how[1])


_KERNELS = {
    ("cpu", SDPBackend.FLASH_ATTENTION): AttentionKernel(_cpu_forward, _cpu_backward),
    ("meta", SDPBackend.MATH): AttentionKernel(_cpu_forward, _cpu_backward),  # in a plan, where nothing is chosen
    ("cuda", SDPBackend.FLASH_ATTENTION): AttentionKernel(_flash_forward, _flash_backward),
    ("cuda", SDPBackend.EFFICIENT_ATTENTION): AttentionKernel(_efficient_forward, _efficient_backward),
    ("cuda", SDPBackend.CUDNN_ATTENTION): AttentionKernel(_cudnn_forward, _cudnn_backward),
}
_HEAD_SIZES = 8
"""Kernels of GPUs take heads whose sizes are multiples of this; `scaled_dot_product_attention()` pads others."""


def attend_in_ring(
    ring: Ring, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor | None:
    """Return causal attention from this device's queries to the tokens of all devices of a ring. Collective.

    Args:
        ring: The devices.
        query: Of shape (rows, heads, tokens, size), of this device's early chunk and, behind it, its late one.
        key: Likewise, of a number of heads that divides the queries'.
        value: Likewise.
        scale: What scores are multiplied with; None for 1 / sqrt(size).

    Returns:
        Of the shape of `query`; it has no second derivative. None, on all devices, where the outputs of the kernel that
        PyTorch would choose cannot be added up.
    """
    # As autocast has it for scaled_dot_product_attention(); a plan's dtypes are those of its trace.
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kernel = _find_kernel(query, value)
    if kernel is None:
        return None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: torch.Tensor = _RingAttention.apply(query, torch.stack([key, value]), ring, kernel, scale)
    return output


def _find_kernel(query: torch.Tensor, value: torch.Tensor) -> AttentionKernel | None:
    """Return the kernel that PyTorch would choose; None where it gives no logarithms, or not of such heads."""
    size = query.shape[-1]
    if value.shape[-1] != size or (query.is_cuda and size % _HEAD_SIZES):
        return None
    chosen = torch._fused_sdp_choice(query, query, query, None, 0.0, True)  # keys are as many, and as large
    return _KERNELS.get((query.device.type, SDPBackend(chosen)))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, own: torch.Tensor, ring: Ring, kernel: AttentionKernel, scale: float
    ) -> torch.Tensor:
        total = torch.zeros(query.shape, dtype=_summed_in(query), device=query.device)
        logs = torch.full(query.shape[:-1], -torch.inf, dtype=_summed_in(query), device=query.device)
        ctx.beside = {}
        for source, pair in _travelling(own, ring):
            seen = causal_block(ring.index, source)
            keys, values = _for_all_heads(_rows(pair, seen.keys), query.shape[1])
            output, added, ctx.beside[source] = kernel.forward(
                _rows(query, seen.queries), keys, values, seen.is_causal, scale
            )
            _add(_rows(total, seen.queries), _rows(logs, seen.queries, dim=-1), output, added)
        output = total.to(query.dtype)
        ctx.save_for_backward(query, own, output, logs)
        ctx.how = ring, kernel, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        query, own, output, logs = ctx.saved_tensors
        ring, kernel, scale = ctx.how
        of_query = torch.zeros(query.shape, dtype=_summed_in(query), device=query.device)
        # What comes with keys and values is what devices before this one have found of their gradients.
        gradients = partial(torch.zeros, own.shape, dtype=_summed_in(query), device=query.device)
        for source, pair in _travelling(own, ring):
            seen = causal_block(ring.index, source)
            keys, values = _for_all_heads(_rows(pair, seen.keys), query.shape[1])
            given, rows, made = (_rows(each, seen.queries).contiguous() for each in (gradient, query, output))
            sums = _rows(logs, seen.queries, dim=-1).contiguous()
            of_rows, *of_block = kernel.backward(
                given, rows, keys, values, made, sums, ctx.beside[source], seen.is_causal, scale
            )
            _rows(of_query, seen.queries).add_(of_rows)
            of_pair = gradients()
            _rows(of_pair, seen.keys).add_(torch.stack(of_block).unflatten(2, (own.shape[2], -1)).sum(3))
            gradients = ring.pass_on(of_pair)
        return of_query.to(query.dtype), gradients().to(own.dtype), None, None, None


def _summed_in(query: torch.Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _travelling(own: torch.Tensor, ring: Ring) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield whose keys and values are here, and these, one device's after another, while the next are on their way."""
    pair = own
    for step in range(ring.size - 1):
        arrived = ring.pass_on(pair)
        yield (ring.index - step) % ring.size, pair
        pair = arrived()
    yield (ring.index + 1) % ring.size, pair


def _rows(tensor: torch.Tensor, halves: range, dim: int = -2) -> torch.Tensor:
    """Return a view of some of the two chunks of a dimension of tokens."""
    half = tensor.shape[dim] // 2
    return tensor.narrow(dim, halves.start * half, len(halves) * half)


def _for_all_heads(pair: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, of shape (2, rows, heads, tokens, size), for as many heads as there are of queries."""
    keys, values = pair.repeat_interleave(num_heads // pair.shape[2], 2)
    return keys, values


def _add(total: torch.Tensor, logs: torch.Tensor, output: torch.Tensor, added: torch.Tensor) -> None:
    """Add the output of another block of keys, in place; the weights of all are in proportion to their sums."""
    summed = torch.logaddexp(logs, added)
    total.mul_((logs - summed).exp()[..., None]).add_(output * (added - summed).exp()[..., None])
    logs.copy_(summed)
