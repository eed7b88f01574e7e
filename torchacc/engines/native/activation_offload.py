"""Keep in the host's memory what the forward pass saves for the backward pass."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


@dataclass(frozen=True)
class _OnHost:
    """A tensor's values on the host, maybe still on their way there, and the device from which they came."""

    values: torch.Tensor
    device: torch.device


class SaveActivationsOnHost(saved_tensors_hooks):
    """A context for a forward: PyTorch's `save_on_cpu` in pinned memory, but that it waits for no copy.

    Both copies go through the stream that computes, so that they are in order with what writes the tensor and with what
    reads it; PyTorch keeps memory, pinned memory included, from other uses until the copies begun with it are done.

    Weights are left where they are. Autograd saves a unit's unsharded weights, too. FSDP2 frees their memory after
    forward and fills it again for backward; copied, each process would hold all of the model on the host.
    """

    def __init__(self) -> None:
        pins = torch.accelerator.is_available()

        def pack(tensor: torch.Tensor) -> torch.Tensor | _OnHost:
            if _is_weight(tensor):
                return tensor
            pinned = pins and tensor.layout == torch.strided
            room = torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=pinned)
            return _OnHost(room.copy_(tensor, non_blocking=pinned), tensor.device)

        def unpack(saved: torch.Tensor | _OnHost) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            return saved.values.to(saved.device, non_blocking=pins)

        super().__init__(pack, unpack)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one, as the transposed weight that a linear layer saves."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
