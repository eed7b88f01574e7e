"""Parameters without dimensions, which FSDP2 does not take: every device keeps a copy of them."""

from functools import partial
from typing import Any

import torch
from torch import nn

from torchacc.engines.initial_values import materialise_parameters
from torchacc.engines.process_group import ProcessGroup
from torchacc.errors import EngineError
from torchacc.parallel.plan import ShardingPlan


def replicate(model: nn.Module, plan: ShardingPlan, mesh: Any, device: torch.device) -> None:
    """Turn parameters without dimensions, which `fully_shard()` refuses, into replicated DTensors.

    `shard_arithmetic` computes with them, wherever they are used, and averages their gradients over the devices.

    Args:
        model: The model, which is changed in place.
        plan: Its plan.
        mesh: The DeviceMesh over which its other parameters are sharded.
        device: This process's.
    """
    from torch.distributed.tensor import DTensor, Replicate

    from torchacc.engines.native.shard_arithmetic import gradient_over_data

    numbers = [planned for planned in plan.parameters if not planned.shape]
    materialise_parameters(model, numbers, plan, device)
    for planned in numbers:
        value = model.get_parameter(planned.name).detach().to(device, copy=True)
        number = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
        new = nn.Parameter(number)
        new.register_hook(partial(gradient_over_data, number._spec))
        new.requires_grad_(planned.trainable)
        for owner, leaf in planned.owners(model):
            owner._parameters[leaf] = new


def check_used_alike(model: nn.Module, plan: ShardingPlan, group: ProcessGroup) -> None:
    """Check that a forward has used the same parameters without dimensions in every process. Collective.

    Raises:
        EngineError: It has not: their gradients would be averaged by some processes only.
    """
    from torchacc.engines.native.shard_arithmetic import pop_used

    if group.job.num_processes == 1:
        return
    names = [planned.name for planned in plan.parameters if not planned.shape]
    used = [int(pop_used(model.get_parameter(name))) for name in names]
    agreed = group.all_reduce_max([*used, *(-each for each in used)])
    for name, most, negated_least in zip(names, agreed, agreed[len(names) :], strict=False):
        if most != -negated_least:
            raise EngineError(
                f"the forward of some processes has used the parameter {name!r}, which has no dimensions, and that of "
                "others has not: natively its gradient would wait for them. Use it in every forward, such as by "
                f"`output = output + 0 * self.{name.rpartition('.')[2]}`, or give it one dimension: "
                "nn.Parameter(torch.ones(1))"
            )
