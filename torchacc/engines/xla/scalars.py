"""Make the hyperparameters of an optimizer's step inputs of its program, whatever their values are.

torch_xla writes 0 and 1 into a program as constants, and makes one input of numbers that are equal. So a learning rate
of 0, the rates of two groups that meet, or a bias correction that has grown to 1 would be another program, compiled
anew. Here each number of an update is a tensor of its own on the device.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import mul, truediv
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Put = Callable[[torch.Tensor], torch.Tensor]
"""Moves a host tensor without dimensions to the device, as plain data."""

_WITH_OPERANDS = {"mul", "div", "truediv", "rdiv", "add", "sub", "lerp"}
"""Functions that take a tensor without dimensions in place of a number."""
_WITH_ALPHA = {"add", "sub"}
"""Functions whose second operand is multiplied by `alpha`, which has to be a number."""
_WITH_VALUE = {"addcmul": mul, "addcdiv": truediv}
"""Functions that add a product or a quotient, multiplied by `value`, which has to be a number."""

_IN_PLACE = {"mul_", "div_", "add_", "sub_", "lerp_", "addcmul_", "addcdiv_"}
"""Functions that are called with `out=` in place of in place, where PyTorch checks shapes of XLA's tensors in Python,
which took half of the time of recording a step."""

_OF_EACH_PARAMETER = {"_single_tensor_adafactor", "_single_tensor_muon"}
"""Updates whose numbers are each parameter's own, so that where two are equal that is chance."""


@dataclass(frozen=True)
class _NumberRole:
    """What a number is for: one tensor takes its place for as long as its value is the same."""

    argument: str
    """The function and its argument."""
    repeats: int
    """How often the function was called on the same tensor before."""
    tensor: int
    """Which of the update's tensors it is called on, where each has numbers of its own."""
    dtype: torch.dtype


class UpdateNumbers:
    """The numbers in the update of one group of parameters, kept on the device from step to step."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._kept: dict[_NumberRole, list[tuple[float, torch.Tensor]]] = defaultdict(list)

    @contextmanager
    def on_device(self, update: str) -> Iterator[None]:
        """Context manager in which functions of device tensors take scalars from the device, for one update.

        Args:
            update: The name of the function that updates it.
        """
        used: dict[_NumberRole, dict[float, torch.Tensor]] = defaultdict(dict)

        def tensor_of(role: _NumberRole, number: float) -> torch.Tensor:
            if number not in used[role]:
                used[role][number] = self._keep(role, len(used[role]), number)
            return used[role][number]

        with _NumbersOnDevice(tensor_of, of_each_parameter=update in _OF_EACH_PARAMETER):
            yield

    def _keep(self, role: _NumberRole, index: int, number: float) -> torch.Tensor:
        """Return the tensor of a role's number, of which this is the index-th in this step; most stay as they were."""
        kept = self._kept[role]
        if index == len(kept):
            kept.append((number, self._put(torch.tensor(number, dtype=role.dtype))))
        elif kept[index][0] != number:
            kept[index] = (number, self._put(torch.tensor(number, dtype=role.dtype)))
        return kept[index][1]


class _NumbersOnDevice(TorchFunctionMode):
    def __init__(self, tensor_of: Callable[[_NumberRole, float], torch.Tensor], *, of_each_parameter: bool) -> None:
        super().__init__()
        self._tensor_of = tensor_of
        self._of_each_parameter = of_each_parameter
        self._calls: Counter[tuple[str, int]] = Counter()
        self._seen: dict[int, tuple[int, torch.Tensor]] = {}
        """Of each tensor that a function was called on: its place in their order, and itself, to keep its id."""

    def _number(self, argument: str, called_on: torch.Tensor, number: float) -> torch.Tensor:
        place, _ = self._seen.setdefault(id(called_on), (len(self._seen), called_on))
        repeats = self._calls[argument, place]
        self._calls[argument, place] += 1
        return self._tensor_of(
            _NumberRole(argument, repeats, place if self._of_each_parameter else 0, called_on.dtype), number
        )

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        kwargs = dict(kwargs or {})
        if not (isinstance(first, torch.Tensor) and first.device.type == "xla" and first.is_floating_point()):
            return func(*args, **kwargs)
        name = func.__name__.strip("_")
        if func.__name__ in _IN_PLACE:
            return self.__torch_function__(getattr(torch, name), types, args, {**kwargs, "out": first})

        number = partial(self._number, func.__name__, first)
        factor = partial(self._number, f"{func.__name__} by a factor", first)
        if name in _WITH_OPERANDS:
            args = [number(arg) if isinstance(arg, float) else arg for arg in args]
        if name in _WITH_ALPHA and isinstance(kwargs.get("alpha"), float) and kwargs["alpha"] != -1.0:
            return func(first, args[1].to(first.dtype) * factor(kwargs.pop("alpha")), **kwargs)
        if name in _WITH_VALUE and isinstance(kwargs.get("value"), float):
            return torch.add(first, _WITH_VALUE[name](args[1], args[2]) * factor(kwargs.pop("value")), **kwargs)
        if name == "setitem" and isinstance(args[1], torch.Tensor) and args[1].dtype == torch.bool:
            return first.masked_fill_(args[1], args[2])
        if name == "addmm" and kwargs:
            return _addmm(*args, **kwargs)
        return func(*args, **kwargs)


def _addmm(
    added: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """Return what torch.addmm() does, which torch_xla leaves to the host where it is given factors."""
    return (beta * added.float() + alpha * (one.float() @ other.float())).to(added.dtype)
