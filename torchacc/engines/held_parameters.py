"""The parameters that sharding has left in a model, which nothing is to replace."""

from operator import is_
from typing import Any

from torch import nn

from torchacc.errors import EngineError


class HeldParameters:
    """Which parameters a sharded model has, under which names.

    An engine gathers the weights that it has sharded, whatever else a script has put in their place by then: by an
    assignment, a parametrization, another layer, or for the length of `torch.func.functional_call()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = dict(model.named_parameters(remove_duplicate=False))
        self._seen = self._look()

    def _look(self) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
        """Return what the modules have: the dicts, each with the values that are in it now."""
        held = (each for module in self._model.modules() for each in (module._parameters, module._modules))
        return [(each, tuple(each.values())) for each in held]

    def check(self) -> None:
        """Check that they are what they were.

        Raises:
            EngineError: One is another, or is gone, or there is one more.
        """
        if all(len(held) == len(seen) and all(map(is_, held.values(), seen)) for held, seen in self._seen):
            return
        now = dict(self._model.named_parameters(remove_duplicate=False))
        for name in {**self._names, **now}:
            if now.get(name) is not self._names.get(name):
                raise EngineError(
                    f"the parameter {name!r} is not the one that accelerate() has sharded, which the model would go on "
                    "with: it was assigned, parametrized, or replaced with its module, or is one that "
                    "torch.func.functional_call() was given. Change values in place, under torch.no_grad() or by "
                    "load_state_dict(), and modules before accelerate(); functional_call() is for a copy of the model "
                    "that is not sharded"
                )
        self._seen = self._look()  # modules without parameters may come and go
