"""What a sharded model's forward returns: seen by FSDP2, and full where it has no dimensions."""

from dataclasses import is_dataclass
from typing import Any

from torch.utils._pytree import register_dataclass, tree_leaves

from torchacc.data.tree import map_tensors
from torchacc.engines.native.shard_arithmetic import full_tensor, is_of_model


def with_full_numbers(output: Any) -> Any:
    """Return an output with ordinary tensors for parameters without dimensions, and for what was computed of them."""
    return map_tensors(
        lambda tensor: full_tensor(tensor) if not tensor.dim() and is_of_model(tensor) else tensor, output
    )


def let_pytree_see(output: Any) -> None:
    """Register the dataclasses in an output with PyTorch's pytree, by which FSDP2 finds where backward starts."""
    for leaf in tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            let_pytree_see(output)
            return
