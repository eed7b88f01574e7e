"""Spread the experts of models of transformers over devices (expert parallelism): tokens go to the device of theirs.

A module of experts is a unit of FSDP2's that is gathered by the devices that hold the same experts only. At rest its
parameters are shards of the full ones over all devices, as those of every unit. The model's own forward of the module
computes the tokens of all devices with the experts that are gathered here. Devices that share layers (`tp`) have the
same tokens: each sends a part of them, and they put together what comes back.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchacc.config import Config
from torchacc.engines.expert_families import check_experts
from torchacc.engines.native.expert_collectives import cut_rows, exchange_counts, exchange_rows, join_rows
from torchacc.engines.option_conflicts import refuse_beside
from torchacc.engines.process_group import ProcessGroup
from torchacc.errors import DataError
from torchacc.parallel.axes import Role
from torchacc.parallel.experts import EXPERT_SHARDING_ROLES, Experts
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import PlannedParameter


def check(config: Config, mesh: Mesh, model: nn.Module) -> None:
    """Refuse what would not compute the unsharded numbers, or is not known to.

    Args:
        config: A resolved config.
        mesh: Its mesh.
        model: The model; it is only read.

    Raises:
        ConfigError: It would not.
    """
    dist_, compute = config.dist, config.compute
    asked = f"config.dist.ep.size = {mesh.size(Role.EXPERT)}"
    refused = {
        "config.dist.tp.plan": dist_.tp.plan is not None,
        "config.dist.fsdp.cpu_offload = True": dist_.fsdp.cpu_offload,
        "config.compute.compile = True": compute.compile,
        "config.compute.fp16 = True": compute.fp16,
    }
    refuse_beside(asked, refused)
    check_experts(asked, model)


def make_mesh(mesh: Mesh, device_type: str, group: ProcessGroup) -> Any:
    """Return the DeviceMesh (pipeline, replicate, expert, shard), whose shards are of the same experts. Collective.

    Without the first two where they have one process: each of its groups would be made by all processes.
    """
    dims = ((Role.PIPELINE,), (Role.REPLICATE,), EXPERT_SHARDING_ROLES, (Role.SHARD,))
    ranks = sorted(range(mesh.num_devices), key=lambda rank: [mesh.rank_in_group(rank, *roles) for roles in dims])
    made = [roles for roles in dims[:-1] if roles == EXPERT_SHARDING_ROLES or mesh.size(*roles) > 1]
    sizes = {roles[0].value: mesh.size(*roles) for roles in made}
    sizes[Role.SHARD.value] = mesh.num_devices // math.prod(sizes.values())
    return group.device_mesh(device_type, sizes, ranks)


def install(module: nn.Module, experts: Experts, mesh: Any, sharing: dist.ProcessGroup | None) -> None:
    """Replace a module's forward by one that sends tokens to the devices of their experts, and brings results back.

    Args:
        module: The module, which is changed in place.
        experts: Which experts lie where.
        mesh: What `make_mesh()` made.
        sharing: The devices that share layers, and so have the same tokens; None where layers are not split.
    """
    group: dist.ProcessGroup = mesh.get_group(Role.EXPERT.value)
    forward: Callable[..., torch.Tensor] = module.forward
    positions = torch.tensor(experts.positions, device=mesh.device_type)
    attributes: dict[str, Any] = vars(module)

    def compute(tokens: torch.Tensor, own: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        attributes["num_experts"] = experts.num_held  # here only: a script that counts loads looks for all
        try:
            return forward(tokens, own, weights)
        finally:
            attributes["num_experts"] = experts.num_experts

    @functools.wraps(forward)
    def run(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if sharing is None:
            return _run(compute, module, positions, group, hidden, chosen, weights)
        own, chosen, own_weights = cut_rows((hidden, chosen, weights), sharing)
        computed = _run(compute, module, positions, group, own, chosen, own_weights)
        return join_rows((computed,), sharing, len(hidden))[0]

    module.forward = run


def _run(
    forward: Callable[..., torch.Tensor],
    module: nn.Module,
    positions: torch.Tensor,
    group: dist.ProcessGroup,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Compute tokens with the experts of all devices. Collective.

    Args:
        forward: The module's own, which computes with the experts of this device.
        module: The module.
        positions: For each expert its position where the experts of all devices lie one after another.
        group: The devices.
        hidden: This device's tokens, of shape (tokens, width).
        chosen: Which experts each token has, of shape (tokens, experts per token).
        weights: With which weights, of the same shape.
    """
    wanted = positions[chosen.reshape(-1)]
    order = wanted.argsort(stable=True)
    counts = torch.bincount(wanted, minlength=len(positions)).view(group.size(), -1)
    received = exchange_counts(counts, group)
    num_sent, num_received = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    tokens, token_weights = exchange_rows(
        (hidden[order // chosen.shape[1]], weights.reshape(-1)[order]), group, sent=num_sent, received=num_received
    )
    own = torch.arange(received.shape[1], device=hidden.device).repeat(group.size())
    own = own.repeat_interleave(received.reshape(-1))
    computed = forward(tokens, own[:, None], token_weights[:, None]) if len(tokens) else tokens
    (back,) = exchange_rows(
        (computed,),
        group,
        sent=num_received,
        received=num_sent,
        after=(tokens, token_weights, *module.parameters()),
    )
    of_tokens = torch.empty_like(order)
    of_tokens[order] = torch.arange(len(order), device=order.device)
    summed = (
        back[of_tokens].view(*chosen.shape, back.shape[1]).sum(1, dtype=torch.promote_types(back.dtype, torch.float32))
    )
    return summed.to(hidden.dtype)


def check_microbatches(count: int, agree: Callable[[Sequence[int]], list[int]]) -> None:
    """Check that the devices of a stage run as many microbatches, as each needs the experts of all. Collective.

    Args:
        count: How many this one runs.
        agree: Returns the largest that any process has of each number.

    Raises:
        DataError: They run different numbers.
    """
    most, negated = agree([count, -count])
    if most != -negated:
        raise DataError(
            f"the devices have batches of {-negated} to {most} microbatches (config.dist.pp.num_microbatches), and "
            "each needs the experts of all (config.dist.ep.size): give all ranks as many samples, as a loader of "
            "accelerate() does"
        )


def keep_own(module: nn.Module, experts: Experts, mesh: Any) -> None:
    """Replace the parameters of a module by those of the experts that are gathered here, on the device."""
    held = list(experts.held[mesh.get_local_rank(Role.EXPERT.value)])
    for name, parameter in list(module.named_parameters(recurse=False)):
        own = parameter.detach()[held].to(mesh.device_type).contiguous()
        module._parameters[name] = nn.Parameter(own, requires_grad=parameter.requires_grad)


def finish(module: Any, parameters: tuple[PlannedParameter, ...], mesh: Any, num_different: int) -> None:
    """Register shards of the full parameters on a module that `fully_shard()` has sharded; average their gradients.

    Its shards are those: which rows a device has of the experts that are gathered here is which it has of all.

    A gradient is the sum over the tokens of all devices that send some here, and FSDP2 divides by the number of those
    that it sums over. That is not said by `set_gradient_divide_factor()`, as torch 2.13 divides twice where it is one.

    Args:
        module: The module.
        parameters: Its parameters as planned.
        mesh: The DeviceMesh over which full parameters are distributed.
        num_different: Among how many devices with different tokens experts are spread.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    placements = [_placement(name, mesh) for name in mesh.mesh_dim_names]
    for planned in parameters:
        name = planned.name.rpartition(".")[2]
        shard = module._parameters[name]
        meta = torch.empty(planned.shape, device="meta")
        full = DTensor.from_local(
            shard.detach().to_local(), mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )
        module._parameters[name] = nn.Parameter(full, requires_grad=shard.requires_grad)
    for parameter in fully_shard.state(module)._fsdp_param_group.fsdp_params:  # type: ignore[attr-defined]
        parameter.reset_sharded_param()
    module.set_all_reduce_hook(lambda gradients: gradients.div_(num_different))


def _placement(dim: str, mesh: Any) -> Any:
    """Return how parameters of experts lie along a dimension of the DeviceMesh: rows, those of split layers first."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if dim == Role.SHARD.value and Role.TENSOR.value in mesh.mesh_dim_names:
        return _StridedShard(0, split_factor=mesh[Role.TENSOR.value].size())
    return Replicate() if dim == Role.REPLICATE.value else Shard(0)
