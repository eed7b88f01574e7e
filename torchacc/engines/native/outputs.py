"""What a sharded model's forward returns: seen by FSDP2, and full where it has no dimensions."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.utils._pytree import register_dataclass, tree_leaves

from torchacc.data.tree import map_tensors
from torchacc.engines.native.shard_arithmetic import full_tensor, is_of_model
from torchacc.errors import EngineError


def with_full_scalars(output: Any) -> Any:
    """Return an output with ordinary tensors for parameters without dimensions, and for what was computed of them."""
    return map_tensors(
        lambda tensor: full_tensor(tensor) if not tensor.dim() and is_of_model(tensor) else tensor, output
    )


def let_pytree_see(output: Any) -> None:
    """Register the dataclasses in an output with PyTorch's pytree, by which FSDP2 finds where backward starts.

    Raises:
        EngineError: All that backward could start from lies in objects of other kinds.
    """
    leaves = tree_leaves(output)
    for leaf in leaves:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            let_pytree_see(output)
            return
    if not any(_has_gradient(leaf) for leaf in leaves):
        hiding = next((leaf for leaf in leaves if any(map(_has_gradient, _held_by(leaf)))), None)
        if hiding is not None:
            raise EngineError(
                f"the model returns a {type(hiding).__name__}, in which FSDP2 does not find the tensors that backward "
                "starts from: return a tensor, a dict, a tuple or a dataclass, and make the object of that"
            )


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _held_by(leaf: Any) -> list[Any]:
    """Return what an object that pytree does not look into holds."""
    found = list(leaf.values()) if isinstance(leaf, Mapping) else []
    return [*found, *getattr(leaf, "__dict__", {}).values()] if not isinstance(leaf, torch.Tensor) else []
