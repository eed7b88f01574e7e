"""Copies between the host and an accelerator, by pinned memory, which the device reads and writes by itself."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from torchacc.data.tree import map_tensors


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device, copied beside what it computes.

    Waits for the copies, and for nothing else: the loader calls it in a thread of its own.

    Args:
        batch: A tree of tensors on the host.
        device: The accelerator.
    """
    stream, computing = _copy_stream(device), torch.accelerator.current_stream(device)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor.to(device)
        moved = tensor.pin_memory().to(device, non_blocking=True)
        # Its memory is the copying stream's, which would use it again while a step that has had it still runs.
        moved.record_stream(computing)
        return moved

    with torch.get_device_module(device).stream(stream):
        moved = map_tensors(copied, batch)
    stream.synchronize()
    return moved


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors on the host: those that are there as they are, others copied, all of them in one wait.

    What an accelerator has is copied to pinned memory.
    """
    found = [tensor if tensor.device.type == "cpu" else _begin_copy(tensor) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.current_stream(device).synchronize()
    return found


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return room.copy_(tensor, non_blocking=True)


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)
