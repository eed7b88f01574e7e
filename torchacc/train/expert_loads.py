"""How the tokens of a mixture of experts spread over them, natively: counted on the device, fetched in intervals."""

from functools import partial
from typing import Any

import torch
from torch import nn

from torchacc.engines.sharded_model import sharded_model
from torchacc.parallel.experts import count_routed


class ExpertLoads:
    """Counts how many tokens each expert is given while the model trains."""

    def __init__(self, model: nn.Module) -> None:
        """Begin to count; nothing is counted in a model without experts, under XLA, and in compiled layers.

        Args:
            model: One that `accelerate()` returned.
        """
        engine = sharded_model(model).engine
        self._group = engine.group
        self._counts: dict[str, torch.Tensor] = {}
        if engine.device.type == "xla" or engine.config.compute.compile:
            return
        for name, module in model.named_modules():
            number = count_routed(module)  # of another stage's, too: every process counts for the same modules
            if number is not None:
                self._counts[name] = torch.zeros(number, dtype=torch.int64, device=engine.device)
                module.register_forward_pre_hook(partial(_count, self._counts[name]))

    def take(self) -> dict[str, list[float]]:
        """Return each expert's share of the tokens since the last call, by the module's name. Collective.

        A token that several experts compute counts for each. Every process makes the same calls.
        """
        if not self._counts:
            return {}
        counts = self._group.all_reduce_sum(torch.cat(list(self._counts.values())).cpu())
        for own in self._counts.values():
            own.zero_()
        found = zip(self._counts, counts.split([len(own) for own in self._counts.values()]), strict=True)
        return {name: (own / own.sum()).tolist() for name, own in found if own.any()}


def _count(counts: torch.Tensor, module: nn.Module, args: Any) -> None:
    """Count the experts that tokens have: the second argument of the experts of transformers."""
    chosen = args[1] if len(args) > 1 else None
    if module.training and isinstance(chosen, torch.Tensor) and not chosen.is_floating_point():
        chosen = chosen.detach().reshape(-1)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
