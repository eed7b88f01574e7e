"""Experts that are spread over the devices of one program: each device computes its own, for all tokens of its group.

Which tokens an expert has is known only when a step runs, and a program's shapes before. So the devices along the axis
of experts gather each other's tokens, each computes all of them with its own experts, and their outputs are summed
where their tokens came from. No token is dropped, and what experts compute of tokens that have not chosen them is zero.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from torchacc.config import Config
from torchacc.engines.expert_families import check_experts
from torchacc.engines.option_conflicts import refuse_beside
from torchacc.engines.patches import dense_experts
from torchacc.engines.patches.split_heads import in_autocast_dtype
from torchacc.engines.xla.annotated_gather import Annotate
from torchacc.engines.xla.partition import Spec
from torchacc.parallel.axes import Role, entry_of
from torchacc.parallel.experts import EXPERT_SHARDING_ROLES
from torchacc.parallel.mesh import Mesh


def check(config: Config, mesh: Mesh, model: nn.Module) -> None:
    """Refuse what would not compute the unsharded numbers, or is not known to.

    Args:
        config: A resolved config.
        mesh: Its mesh.
        model: The model; it is only read.

    Raises:
        ConfigError: It would not.
    """
    asked = f"config.dist.ep.size = {mesh.size(Role.EXPERT)}"
    refuse_beside(asked, {"config.dist.tp.plan": config.dist.tp.plan is not None})
    check_experts(asked, model)


def install(module: Any, mesh: Mesh, annotate: Annotate) -> None:
    """Replace a module's forward: each device computes its own experts, whose gathered weights stay split.

    Args:
        module: The module, which is changed in place.
        mesh: The mesh.
        annotate: Says how a tensor of the program is split.
    """
    every = (*mesh.data_axes, *mesh.axes(Role.SEQUENCE))
    held = mesh.axes(*EXPERT_SHARDING_ROLES)
    shared = entry_of(axis for axis in every if axis not in held)

    def constrain(tensor: torch.Tensor, specs: Sequence[Spec], of_gradient: Sequence[Spec]) -> torch.Tensor:
        constrained: torch.Tensor = _Constrain.apply(tensor, annotate, specs, of_gradient)
        return constrained

    def run(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        divides = len(hidden) % prod(map(mesh.axis_size, every)) == 0
        own, gathered = ((entry_of(every), None), (shared, None)) if divides else ((None, None), (None, None))
        by_expert = (gathered[0], entry_of(held))
        is_chosen, shares = dense_experts.shares(module.num_experts, chosen, weights)
        tokens = constrain(in_autocast_dtype(hidden)[0], [gathered], [gathered, own])
        output = dense_experts.compute_all(
            module,
            tokens,
            constrain(is_chosen, [by_expert], []),
            constrain(shares, [by_expert], [own]),
            lambda hidden: constrain(hidden, [(*by_expert, None)], [(*by_expert, None)]),
        )
        return constrain(output, [gathered, own], [gathered]).to(hidden.dtype)

    module.forward = run


class _Constrain(torch.autograd.Function):
    """Say how a tensor is split, and how its gradient is: first in one way, then in another, where there are two."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, annotate: Annotate, specs: Sequence[Spec], of_gradient: Sequence[Spec]
    ) -> torch.Tensor:
        ctx.annotate, ctx.of_gradient = annotate, of_gradient
        return _constrained(tensor, annotate, specs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _constrained(gradient, ctx.annotate, ctx.of_gradient), None, None, None


def _constrained(tensor: torch.Tensor, annotate: Annotate, specs: Sequence[Spec]) -> torch.Tensor:
    for spec in specs:
        tensor = tensor.clone()
        annotate(tensor, spec)
    return tensor
