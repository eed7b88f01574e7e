"""See to it that all processes start from the same model."""

import torch
from torch import nn

from torchacc.engines.process_group import ProcessGroup
from torchacc.errors import ConfigError


def align_replicas(model: nn.Module, group: ProcessGroup, *, broadcast: bool) -> None:
    """Copy rank 0's parameters and buffers to all processes, or check that they are equal. Collective: every process.

    Args:
        model: The model on the host.
        group: The job's processes.
        broadcast: Whether to copy; otherwise a difference is an error.

    Raises:
        ConfigError: The processes hold different models.
    """
    state = dict(model.state_dict())
    shapes = group.all_gather_objects({name: tuple(tensor.shape) for name, tensor in state.items()})
    for rank, other in enumerate(shapes):
        if other != shapes[0]:
            name = next(n for n in (*other, *shapes[0]) if other.get(n) != shapes[0].get(n))
            raise ConfigError(
                f"the processes built different models: {name!r} has the shape {shapes[0].get(name)} on rank 0 and "
                f"{other.get(name)} on rank {rank}"
            )
    if broadcast:
        for tensor in state.values():
            group.broadcast_(tensor)
        return
    digests = group.all_gather_objects({name: _digest(tensor) for name, tensor in state.items()})
    for rank, other in enumerate(digests):
        differing = [name for name in other if other[name] != digests[0][name]]
        if differing:
            raise ConfigError(
                f"rank {rank} starts from other values than rank 0 in {len(differing)} tensors ({differing[0]}, …): "
                "call torch.manual_seed() with the same number on every rank before the model is built, or set "
                "config.dist.fsdp.sync_module_states = True"
            )


def _digest(tensor: torch.Tensor) -> int:
    words = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    # Odd multipliers make the sum depend on the order of the words.
    weights = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64)
    return int((words.to(torch.int64) * weights).sum())
