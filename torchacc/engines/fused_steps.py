"""How an optimizer of torch.optim runs its step: in one kernel for all parameters, or one after the other."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

FUSED = ("Adam", "AdamW")
"""Classes of torch.optim whose fused step both CPUs and GPUs have, and which does what the loop does.

That of SGD fails at sparse gradients, and with momentum where a parameter's first gradient comes later than others'.
"""
_DEVICES = ("cpu", "cuda")


def can_fuse(kind: type[torch.optim.Optimizer], device: torch.device) -> bool:
    """Return whether a class of torch.optim has a fused step on a device that torchacc knows it on."""
    return kind in [getattr(torch.optim, name) for name in FUSED] and device.type in _DEVICES


def faster_choice(optimizer: torch.optim.Optimizer, device: torch.device) -> str | None:
    """Return the option with which a script's optimizer would step faster; None where its own choice is not a loop.

    Args:
        optimizer: The optimizer.
        device: Where its parameters are.
    """
    kind = type(optimizer)
    if kind not in vars(torch.optim).values() or "foreach" not in inspect.signature(kind).parameters:
        return None
    if not any(_loops(group, device) for group in optimizer.param_groups):
        return None
    if can_fuse(kind, device):
        return "fused=True"
    return "foreach=True" if device.type == "cuda" else None


def fuse(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Switch an optimizer for which the script chose no implementation to PyTorch's fused kernel.

    Only on a CPU: elsewhere the default is not a loop, and the numbers of steps would have to move to the device.

    Args:
        optimizer: The optimizer.
        device: Where its parameters are.

    Returns:
        Whether a group of it was told so by this call.
    """
    if device.type != "cpu" or not can_fuse(type(optimizer), device):
        return False
    groups = [
        group
        for group in optimizer.param_groups
        if (group.get("fused"), group.get("foreach")) == (None, None) and _loops(group, device)
    ]
    groups = [group for group in groups if _goes_through_one_kernel(group["params"])]
    for group in groups:
        group["fused"] = True
    return bool(groups)


def _goes_through_one_kernel(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a kernel takes all of them: real numbers, and either all shards or none."""
    are_shards = {hasattr(each, "to_local") for each in parameters}
    return len(are_shards) == 1 and all(each.is_floating_point() for each in parameters)


def leave_out_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Switch an optimizer's fused kernels off, and return whether it would have used them.

    A script asks for them, or a checkpoint that was saved natively.
    """
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    for group in groups:
        group["fused"] = False
    return bool(groups)


def _loops(group: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether a group's parameters are updated one after the other: on a CPU that is PyTorch's default."""
    if group.get("fused") or group.get("differentiable") or group.get("capturable"):
        return False
    foreach = group.get("foreach")
    return device.type == "cpu" if foreach is None else not foreach
