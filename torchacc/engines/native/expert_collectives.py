"""What devices that hold different experts send one another, with gradients."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def exchange_counts(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the counts that the devices have for this one, of a tensor with a row for each device. Collective."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


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


def _send(tensor: torch.Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    found = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(found, tensor.contiguous(), list(received), list(sent), group=group)
    return found
