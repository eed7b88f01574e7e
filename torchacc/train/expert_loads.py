"""How the tokens of a mixture of experts spread over them: counted on the devices, fetched in intervals."""

from functools import partial
from typing import Any

import torch
from torch import nn

from torchacc.engines.sharded_model import sharded_model
from torchacc.parallel.experts import count_routed


class ExpertLoads:
    """Counts how many tokens each expert is given while the model trains."""

    def __init__(self, model: nn.Module) -> None:
        """Begin to count; nothing is counted in a model without experts, in compiled layers, and in a loop of layers.

        Args:
            model: One that `accelerate()` returned.
        """
        self._sharded = sharded_model(model)
        engine = self._sharded.engine
        self._counts: dict[str, torch.Tensor] = {}
        if engine.config.compute.compile or (engine.is_lazy and engine.config.compute.scan_layers):
            return
        for name, module in model.named_modules():
            number = count_routed(module)  # of another stage's, too: every process counts for the same modules
            if number is not None:
                self._counts[name] = self._zeros(number)
                module.register_forward_pre_hook(partial(self._count, name))

    def take(self) -> dict[str, list[float]]:
        """Return each expert's share of the tokens since the last call, by the module's name. Collective.

        A token that several experts compute counts for each. Every process makes the same calls.
        """
        if not self._counts:
            return {}
        own = self._sharded.shards.fetch(list(self._counts.values()))
        counts = self._sharded.engine.group.all_reduce_sum(torch.cat(own))
        found = zip(self._counts, counts.split([len(each) for each in own]), strict=True)
        self._counts = {name: self._zeros(len(each)) for name, each in zip(self._counts, own, strict=True)}
        return {name: (each / each.sum()).tolist() for name, each in found if each.any()}

    def _zeros(self, number: int) -> torch.Tensor:
        zeros: torch.Tensor = self._sharded.engine.to_device(torch.zeros(number, dtype=torch.int64))
        return zeros

    def _count(self, name: str, module: nn.Module, args: Any) -> None:
        """Count the experts that tokens have: the second argument of the experts of transformers."""
        chosen = args[1] if len(args) > 1 else None
        if module.training and isinstance(chosen, torch.Tensor) and not chosen.is_floating_point():
            chosen = chosen.detach().reshape(-1)
            self._counts[name].scatter_add_(0, chosen, torch.ones_like(chosen))
