"""Create an optimizer's state before its first step, without a step.

torch.optim makes its state inside the first step, so that the first step's program differs from all later ones and
everything compiles twice. The state made here is what the first step would have started from: zeros.
"""

from collections.abc import Callable
from typing import Any

import torch

Zeros = Callable[[torch.Tensor], torch.Tensor]
"""Returns zeros laid out like a tensor, as plain data on its device."""


def prime(optimizer: torch.optim.Optimizer, zeros_like: Zeros) -> None:
    """Create the state of every trainable parameter that has none yet.

    Args:
        optimizer: Adam, AdamW or SGD; another kind is left to make its state itself, which costs a second compile.
        zeros_like: Makes the zeros.
    """
    for group in optimizer.param_groups:
        make = _state_of(optimizer, group)
        if make is None:
            continue
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                optimizer.state[parameter].update(make(parameter, zeros_like))


def _state_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Callable[..., dict[str, torch.Tensor]] | None:
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):  # a subclass may keep more
        moments = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

        def adam(parameter: torch.Tensor, zeros_like: Zeros) -> dict[str, torch.Tensor]:
            on_device = group["capturable"] or group["fused"]
            step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            return {"step": step, **{name: zeros_like(parameter) for name in moments}}

        return adam
    # Without dampening momentum * 0 + grad is the buffer that the first step makes.
    if type(optimizer) is torch.optim.SGD and group["momentum"] and not group["dampening"]:
        return lambda parameter, zeros_like: {"momentum_buffer": zeros_like(parameter)}
    return None
