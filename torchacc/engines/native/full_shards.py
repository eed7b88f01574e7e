"""FSDP2's groups of parameters that nobody shares: the shard is the full weight, and is neither copied nor reduced.

So it is with layers that are split over `tp`, stages of `pp` and experts of `ep` where `fsdp` has no device more. FSDP2
would copy each weight to compute with it, and each gradient twice: as much memory again while a unit is unsharded.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torchacc.engines.patches.private_names import FSDPParam, FSDPParamGroup
from torchacc.errors import EngineError


def are_full_weights(group: FSDPParamGroup) -> bool:
    """Return whether modules can compute with the shards of a group as they are."""
    return group._all_gather_process_group.size() == 1 and all(map(_is_weight, group.fsdp_params))


def take_gradients(group: FSDPParamGroup) -> bool:
    """Return whether gradients of such weights are those of the shards, and not summed, scaled or cast on the way."""
    is_cast = group._reduce_dtype not in (None, group._orig_dtype)
    is_scaled = group.gradient_divide_factor not in (None, 1) or group._all_reduce_hook is not None
    return not (group._is_hsdp or is_cast or is_scaled)


def register_unsharded(parameter: FSDPParam, *, in_backward: bool) -> None:
    """Register a shard as the weight that modules compute with: the same tensor each time, with a version of its own.

    Raises:
        EngineError: A script has given a weight of split layers other memory between a forward and its backward, whose
            graph knows the old one.
    """
    local = parameter._sharded_local_tensor.data
    if not hasattr(parameter, "_unsharded_param"):
        parameter.all_gather_outputs = [local.view(-1)]
        parameter.init_unsharded_param()
        parameter.all_gather_outputs = []  # nothing to free
    weight: Any = parameter._unsharded_param
    weight = weight._local_tensor if parameter.is_dtensor else weight
    if weight.data_ptr() != local.data_ptr():  # a script has given the parameter other memory
        if in_backward and parameter.is_dtensor:
            raise EngineError(
                "parameter.data was set between a forward and its backward, of layers that are split over devices "
                "(config.dist.tp.size): gradients would be those of the old weights. Set it after backward(), or write "
                "to it in place, parameter.data.copy_(new)"
            )
        weight.data = local


def hand_over_gradients(parameters: Sequence[FSDPParam]) -> None:
    """Add gradients to those of the shards, and run the hooks that see them."""
    for parameter in parameters:
        gradient = _taken_gradient(parameter)
        if gradient is None:
            continue
        shard = parameter.sharded_param
        if shard.grad is None:
            shard.grad = parameter.to_sharded_dtensor(gradient)
        else:
            shard.grad._local_tensor += gradient  # type: ignore[attr-defined]
        run_hooks(shard)


def run_hooks(parameter: torch.Tensor) -> None:
    """Run what a script has registered by `register_post_accumulate_grad_hook()`."""
    for hook in tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)


def _is_weight(parameter: FSDPParam) -> bool:
    local = parameter._sharded_local_tensor
    is_plain = not (parameter.offload_to_cpu or hasattr(local, "fsdp_pre_all_gather")) and local.is_contiguous()
    return is_plain and parameter.param_dtype in (None, local.dtype) and local.shape == parameter._orig_size


def _taken_gradient(parameter: FSDPParam) -> torch.Tensor | None:
    """Return what backward has computed, which the weight no longer has afterwards."""
    if not hasattr(parameter, "_unsharded_param"):
        return None
    gradient = None
    parameter.accumulate_unsharded_grad_if_needed()
    if parameter.unsharded_accumulated_grad is not None:
        gradient = parameter.unsharded_accumulated_grad_data
        parameter.unsharded_accumulated_grad = None
    elif parameter._unsharded_param.grad is not None:
        gradient = parameter.unsharded_grad_data
        parameter._unsharded_param.grad = None
    return gradient
