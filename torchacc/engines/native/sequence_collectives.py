"""What the devices that share a sample send one another, with gradients.

All devices of a sample have the same inputs, and compute the same loss. The engine averages gradients over them, which
divides by the number of parts, so that a gradient of one part alone is multiplied by it first.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torchacc.parallel.sequence_split import SequenceSplit


def all_to_all(tensor: torch.Tensor, group: dist.ProcessGroup, *, split: int, joined: int) -> torch.Tensor:
    """Split a dimension of a tensor over devices, and put together another one that was split. Collective.

    Args:
        tensor: This device's.
        group: The devices.
        split: The dimension to split; it must divide.
        joined: The dimension to put together.
    """
    exchanged: torch.Tensor = _AllToAll.apply(tensor, group, split, joined)
    return exchanged


def scatter_tokens(full: torch.Tensor, of: SequenceSplit, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this device's part of a tensor that all have, of shape (rows, length, …). Collective in backward."""
    part: torch.Tensor = _ScatterTokens.apply(full, of, group)
    return part


def gather_tokens(part: torch.Tensor, of: SequenceSplit, group: dist.ProcessGroup) -> torch.Tensor:
    """Return a tensor of shape (rows, length, …) from its parts. Collective."""
    full: torch.Tensor = _GatherTokens.apply(part, of, group)
    return full


def all_gather(part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return a tensor whose parts along a dimension the devices have, one after another. Collective.

    Gradients of it are different on each device, and summed.
    """
    full: torch.Tensor = _AllGatherTensors.apply(part, group, dim)
    return full


def pass_on(tensor: torch.Tensor, *, group: dist.ProcessGroup, index: int) -> Callable[[], torch.Tensor]:
    """Begin to send a tensor to the next device; return what waits for the one of the previous device. Collective.

    All have tensors of one shape. It is an all-to-all in which each device has something for one other; no gradients.

    Args:
        tensor: What is sent.
        group: The devices.
        index: This device's place among them.
    """
    size, sent = group.size(), tensor.contiguous()
    received = torch.empty_like(sent)
    from_each, to_each = [0] * size, [0] * size
    from_each[(index - 1) % size] = to_each[(index + 1) % size] = sent.numel()
    work = dist.all_to_all_single(received.view(-1), sent.view(-1), from_each, to_each, group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return received

    return wait


def all_reduce(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over the devices of a tensor. Collective."""
    summed: torch.Tensor = _AllReduce.apply(value, group)
    return summed


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, split: int, joined: int) -> torch.Tensor:
        ctx.how = group, split, joined
        parts = torch.stack(tensor.chunk(group.size(), split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, split, joined = ctx.how
        return all_to_all(gradient, group, split=joined, joined=split), None, None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, of: SequenceSplit, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.how = of, group
        return of.part(full)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        of, group = ctx.how
        return gather_tokens(gradient, of, group) / of.num_parts, None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, of: SequenceSplit, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.how = of, group
        return of.without_padding(_gathered(part, group, 1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        of, group = ctx.how
        # The losses of the devices may differ, as by dropout behind the model: theirs is the sum.
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).contiguous()
        return scatter_tokens(all_reduce(wide, group).to(gradient.dtype), of, group), None, None


class _AllGatherTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.how = group, dim
        return _gathered(part, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _ReduceScatterTensors.apply(gradient, *ctx.how), None, None


class _ReduceScatterTensors(torch.autograd.Function):
    """The backward of `_AllGatherTensors`, which has one itself."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.how = group, dim
        # Summed in float32, as gradients of bfloat16 keys would lose digits.
        parts = torch.stack(full.to(torch.promote_types(full.dtype, torch.float32)).chunk(group.size(), dim))
        own = parts.new_empty(parts.shape[1:])
        dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=group)
        return own.to(full.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _AllGatherTensors.apply(gradient.contiguous(), *ctx.how), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        summed = value.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(gradient, ctx.group), None


def _gathered(part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return the parts of all devices, one after another along a dimension."""
    parts = part.new_empty(group.size() * part.numel())
    dist.all_gather_into_tensor(parts, part.contiguous().view(-1), group=group)
    return torch.cat(parts.view(group.size(), *part.shape).unbind(), dim)
