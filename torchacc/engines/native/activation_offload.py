"""Keep in the host's memory what the forward pass saves for the backward pass."""

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks


class SaveActivationsOnHost(saved_tensors_hooks):
    """A context for a forward: PyTorch's `save_on_cpu` in pinned memory, which leaves the weights where they are.

    Autograd saves a unit's unsharded weights, too. FSDP2 frees their memory after forward and fills it again for
    backward; copied, each process would hold all of the model on the host.
    """

    def __init__(self, device_type: str) -> None:
        on_host = save_on_cpu(pin_memory=True, device_type=device_type)

        def pack(tensor: torch.Tensor) -> Any:
            return tensor if _is_weight(tensor) else on_host.pack_hook(tensor)

        def unpack(saved: Any) -> torch.Tensor:
            return saved if isinstance(saved, torch.Tensor) else on_host.unpack_hook(saved)

        super().__init__(pack, unpack)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one, as the transposed weight that a linear layer saves."""
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
