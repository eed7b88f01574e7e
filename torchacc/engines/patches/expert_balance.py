"""The loss that balances experts over the tokens of all devices, where each device has a process of its own.

It is a product of two means over tokens: shares of experts, and probabilities. The mean of the devices' losses is
another number. transformers computes it in a function of the same name in each family of models.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from torchacc.engines.process_group import ProcessGroup

_NAME = "load_balancing_loss_func"
_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def modules_with_balance(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules of a model's classes in which such a function is."""
    names = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    found = [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), _NAME)]
    return [module for module in found if list(inspect.signature(getattr(module, _NAME)).parameters) == _PARAMETERS]


@contextmanager
def balanced_over_devices(
    modules: Sequence[ModuleType], all_gather: Callable[[torch.Tensor], torch.Tensor], group: ProcessGroup
) -> Iterator[None]:
    """Context manager that gives the function the routers' logits of all devices, for one forward.

    Args:
        modules: Those that have it.
        all_gather: Returns the rows of all devices, with their gradients. Collective: every process.
        group: The job's processes.
    """
    originals = [(module, getattr(module, _NAME)) for module in modules]
    for module, original in originals:
        setattr(module, _NAME, _of_all(original, all_gather, group))
    try:
        yield
    finally:
        for module, original in originals:
            setattr(module, _NAME, original)


def _of_all(
    original: Callable[..., Any], all_gather: Callable[[torch.Tensor], torch.Tensor], group: ProcessGroup
) -> Callable[..., Any]:
    def balance(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: torch.Tensor | None = None
    ) -> Any:
        if not isinstance(gate_logits, tuple):
            return original(gate_logits, num_experts, top_k, attention_mask)
        device = gate_logits[0].device
        layers = torch.stack([layer.to(device) for layer in gate_logits], dim=1)  # (tokens, layers, experts)
        of_ranks = group.all_gather_objects((len(layers), attention_mask is not None))
        longest = max(count for count, _ in of_ranks)
        mask = None
        if len(set(of_ranks)) > 1 or attention_mask is not None:
            own = layers.new_ones(len(layers)) if attention_mask is None else attention_mask.reshape(-1).to(layers)
            mask = all_gather(nn.functional.pad(own, (0, longest - len(own)))).view(1, -1)
        layers = all_gather(nn.functional.pad(layers, (0, 0, 0, 0, 0, longest - len(layers))))
        return original(layers.unbind(1), num_experts, top_k, mask)

    return balance
