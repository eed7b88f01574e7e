"""The norm of gradients that are DTensors, which PyTorch's own clipping asks for.

Where it looks for the largest element, PyTorch's own raises on a rank whose part of a gradient is empty, and the others
wait.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import torch


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    """Return the norm of full gradients, or None for others than DTensors in shards. Collective: every process.

    Args:
        gradients: Those of which each process holds its parts.
        norm_type: The order of the norm, above 0.
    """
    from torch.distributed.tensor import DTensor, Partial

    if norm_type <= 0 or not gradients or not all(isinstance(gradient, DTensor) for gradient in gradients):
        return None
    alike: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        assert isinstance(gradient, DTensor)
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            return None
        split = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
        alike.setdefault((gradient.device_mesh, split), []).append(gradient.to_local())
    parts = [_combined(mesh, split, local, norm_type) for (mesh, split), local in alike.items()]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]), norm_type)
    return norm


def _combined(mesh: Any, split: Sequence[int], parts: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of tensors that are split alike, from this process's parts of them."""
    import torch.distributed as dist

    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    norms = torch._foreach_norm([part for part in parts if part.numel()], norm_type, dtype)
    own = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype)
    total = (own.max() if norm_type == inf else own.pow(norm_type).sum()).to(mesh.device_type)
    for dim in split:
        operation = dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group=mesh.get_group(dim))
    return total if norm_type == inf else total.pow(1 / norm_type)
