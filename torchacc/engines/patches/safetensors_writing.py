"""Refuse sharded tensors in safetensors by what to write; its own error is about the pointer of a storage."""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from torchacc.engines.patches.versions import is_for_installed
from torchacc.errors import CheckpointError


@functools.cache
def install() -> None:
    """Look at what safetensors is about to write, until the process ends."""
    if not is_for_installed("safetensors_writing"):
        return
    import safetensors.torch

    library: Any = safetensors.torch
    find_shared = library._find_shared_tensors

    @functools.wraps(find_shared)
    def find(tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and (hasattr(tensor, "placements") or tensor.device.type == "xla"):
                raise CheckpointError(
                    f"safetensors cannot write {name!r}, which is sharded: torchacc.checkpoint.save(folder, "
                    "model=model), called by every process, writes a folder with model.safetensors in it. Or hand it "
                    "full weights: save_file(torchacc.full_state_dict(model), path), where every process calls "
                    "full_state_dict(), and rank 0 writes"
                )
        return find_shared(tensors, *args, **kwargs)

    library._find_shared_tensors = find
