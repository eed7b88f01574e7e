"""Create an optimizer's state before its first step, without a step.

torch.optim makes its state inside of the first step, so that the first step's program differs from all later ones and
everything compiles twice. The state made here is what the first step would have started from.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchacc.engines.optimizers import is_for_each_element
from torchacc.engines.xla import runtime
from torchacc.engines.xla.sharded_tensor import local_of

Place = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]
"""Returns a tensor that lies like a parameter, as plain data, from a flat one on the host."""
Put = Callable[[torch.Tensor], torch.Tensor]
"""Returns a copy of a host tensor on the device, as plain data."""


def initialize_state(optimizer: torch.optim.Optimizer, place: Place, put: Put, host: torch.device) -> str | None:
    """Create the state of every parameter that has a gradient and none yet; state that is there keeps its values.

    Args:
        optimizer: Any. One that is not PyTorch's own makes its state by itself.
        place: For state in the shape of its parameter.
        put: For other state on the device.
        host: Where the values are made that `place` and `put` take.

    Returns:
        Why the first step makes state by itself, so that the second is another program; None where it does not.
    """
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None) or not hasattr(kind, "_init_group"):
        return f"{kind.__name__} makes state in its first step, which cannot be made before"
    reason = None
    for group in optimizer.param_groups:
        if kind is torch.optim.SGD and (group["dampening"] or not group["momentum"]):
            if group["momentum"]:
                reason = "SGD with dampening takes its first gradients as its momentum, without damping them"
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and not optimizer.state.get(parameter):
                made = _initial_state(optimizer, group, parameter, host)
                optimizer.state[parameter].update(
                    {key: _laid_out(value, parameter, group, place, put) for key, value in made.items()}
                )
    _place_state(optimizer, place, put)
    return reason


def _initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, host: torch.device
) -> dict[str, torch.Tensor]:
    """Return what the optimizer makes for a parameter before its first step, on the host."""
    shape = local_of(parameter).shape or (1,)  # by which a parameter's averages are told from its step count
    stand_in = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=host))
    stand_in.grad = torch.zeros_like(stand_in)
    kind: Any = type(optimizer)
    settings = {key: group[key] for key in inspect.signature(kind).parameters if key in group}
    other = kind(**{**settings, "params": [stand_in]})
    num_lists = len(inspect.signature(other._init_group).parameters) - 1
    other._init_group(other.param_groups[0], *([] for _ in range(num_lists)))
    state: dict[str, torch.Tensor] = other.state[stand_in]
    if kind is torch.optim.SGD:
        state["momentum_buffer"] = torch.zeros_like(stand_in)  # momentum * 0 + gradient is what the first step makes
    return state


def _laid_out(
    value: torch.Tensor, parameter: nn.Parameter, group: dict[str, Any], place: Place, put: Put
) -> torch.Tensor:
    """Return a host tensor where a step wants it: on the device, but for the numbers that the host computes with."""
    if value.shape == (local_of(parameter).shape or (1,)):
        return place(parameter, value.detach().reshape(-1))
    return put(value) if value.dim() or _computes_on_device(group) else value


def _computes_on_device(group: dict[str, Any]) -> bool:
    return bool(group.get("capturable") or group.get("fused"))


def _place_state(optimizer: torch.optim.Optimizer, place: Place, put: Put) -> None:
    """Lay out anew what the optimizer has made by itself, or loaded, and not where a step wants it.

    Adagrad records its state when it is made, which makes it a part of the first step's program. ASGD and NAdam have
    numbers on the device after `load_state_dict()`, and would wait for each of them at each step.
    """
    places = [
        (group, parameter, key)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
        for key, value in optimizer.state.get(parameter, {}).items()
        if _is_misplaced(optimizer, group, parameter, key, value)
    ]
    values = runtime.to_host([optimizer.state[parameter][key] for _, parameter, key in places])
    for (group, parameter, key), value in zip(places, values, strict=True):
        optimizer.state[parameter][key] = _laid_out(value, parameter, group, place, put)


def _is_misplaced(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter, key: str, value: Any
) -> bool:
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu" or _computes_on_device(group):
        return False
    if not value.dim() and is_for_each_element(key, value.shape, parameter.shape):
        return False
    return not value.dim() or (type(optimizer) is torch.optim.Adagrad and not optimizer.state[parameter]["step"])
