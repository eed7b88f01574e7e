"""What devices that hold different experts send one another, with gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from torchacc.parallel.sharding import chunk


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the counts that the devices have for this one, of a tensor with a row for each device. Collective."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def cut_rows(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Return this device's rows of tensors that all devices have. Collective in backward.

    Gradients are those of all rows, on each device.
    """
    found: tuple[torch.Tensor, ...] = _CutRows.apply(group, *tensors)
    return found


def join_rows(parts: Sequence[torch.Tensor], group: dist.ProcessGroup, length: int) -> tuple[torch.Tensor, ...]:
    """Return tensors of which each device has the rows that `cut_rows()` gives it. Collective.

    All devices compute the same with them, and so have the same gradients.

    Args:
        parts: This device's rows.
        group: The devices.
        length: The number of all rows.
    """
    found: tuple[torch.Tensor, ...] = _JoinRows.apply(group, length, *parts)
    return found


def exchange_rows(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    *,
    sent: Sequence[int],
    received: Sequence[int],
    after: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, ...]:
    """Send each device some rows of tensors, and return those that it has sent. Collective, and so is its backward.

    Args:
        tensors: With as many rows each: first those for the first device, and so on.
        group: The devices.
        sent: How many rows are for each device.
        received: How many rows each device has for this one.
        after: Tensors whose gradients wait for this exchange's backward, also where no row was computed of them: each
            device has to take part in it.
    """
    found: tuple[torch.Tensor, ...] = _ExchangeRows.apply(group, sent, received, len(tensors), *tensors, *after)
    return found


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        sent: Sequence[int],
        received: Sequence[int],
        num_sent: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.how = group, sent, received, len(tensors) - num_sent
        # A recompute ends with the last tensor that is saved, and begins where the first is asked for. A device without
        # rows would save none here, and end before the others, or begin after them.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tuple(_send(each, group, sent, received) for each in tensors[:num_sent])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        group, sent, received, num_after = ctx.how
        back = exchange_rows(gradients, group, sent=received, received=sent)
        return None, None, None, None, *back, *(None for _ in range(num_after))


class _CutRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = group, len(tensors[0]), [each.is_floating_point() for each in tensors]
        own = chunk(len(tensors[0]), group.size(), group.rank())
        found = tuple(each[own.start : own.stop].clone() for each in tensors)
        ctx.mark_non_differentiable(*(each for each in found if not each.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, length, are_trained = ctx.how
        trained = [each for each, is_trained in zip(gradients, are_trained, strict=True) if is_trained]
        joined = iter(join_rows(trained, group, length))
        return None, *(next(joined) if is_trained else None for is_trained in are_trained)


class _JoinRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, length: int, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.save_for_backward(parts[0].new_empty(0))  # as _ExchangeRows does
        return tuple(_joined(each, group, length) for each in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, *cut_rows(gradients, ctx.group)


def _joined(part: torch.Tensor, group: dist.ProcessGroup, length: int) -> torch.Tensor:
    most = len(chunk(length, group.size(), 0))
    padded = F.pad(part, (0, 0) * (part.dim() - 1) + (0, most - len(part))).contiguous()
    parts = padded.new_empty(group.size() * most, *part.shape[1:])
    dist.all_gather_into_tensor(parts, padded, group=group)
    return parts[:length]  # all but the last with rows have as many


def _send(tensor: torch.Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    found = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(found, tensor.contiguous(), list(received), list(sent), group=group)
    return found
