"""See to it that all processes start from the same model."""

import torch
from torch import nn

from torchacc.engines import deferred
from torchacc.engines.process_group import ProcessGroup
from torchacc.errors import ConfigError
from torchacc.logging import get_logger

_log = get_logger(__name__)

_DIGEST_WORDS = 1 << 20
"""Words that are looked at together, so that a large tensor needs little memory beside itself."""


def align_replicas(model: nn.Module, group: ProcessGroup, *, broadcast: bool) -> None:
    """Let all processes start from rank 0's parameters and buffers. Collective: every process.

    Args:
        model: The model on the host.
        group: The job's processes.
        broadcast: Copy without a look; otherwise only where the processes differ, with a line that says so.

    Raises:
        ConfigError: The processes built models of different shapes, or deferred other random numbers.
    """
    state: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    _check_shapes(state, group)
    _check_recipes(model, group)
    state = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
    if not broadcast:
        digests = group.all_gather_objects({name: _digest(tensor) for name, tensor in state.items()})
        differing = {name for digest in digests for name in digest if digest[name] != digests[0][name]}
        if not differing:
            return
        _log.info(
            "%d of the model's tensors differ between the ranks (%s, …), as without a common torch.manual_seed(): "
            "all take rank 0's",
            len(differing),
            min(differing),
        )
    with torch.no_grad():
        for tensor in state.values():
            tensor.copy_(group.broadcast(tensor.detach().contiguous()))


def _check_shapes(state: dict[str, torch.Tensor], group: ProcessGroup) -> None:
    shapes = group.all_gather_objects({name: tuple(tensor.shape) for name, tensor in state.items()})
    for rank, other in enumerate(shapes):
        if other != shapes[0]:
            name = next(n for n in (*other, *shapes[0]) if other.get(n) != shapes[0].get(n))
            raise ConfigError(
                f"the processes built different models: {name!r} has the shape {shapes[0].get(name)} on rank 0 and "
                f"{other.get(name)} on rank {rank}"
            )


def _check_recipes(model: nn.Module, group: ProcessGroup) -> None:
    recipes = group.all_gather_objects(deferred.fingerprints(model))
    for rank, other in enumerate(recipes):
        if other != recipes[0]:
            name = next(n for n in (*other, *recipes[0]) if other.get(n) != recipes[0].get(n))
            raise ConfigError(
                f"deferred_init() on rank {rank} would give {name!r} other values than on rank 0: call "
                "torch.manual_seed() with the same number on every rank before it"
            )


def _digest(tensor: torch.Tensor) -> int:
    words = tensor.detach().cpu().contiguous().reshape(-1).clone().view(torch.uint8)
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    total = 0
    for start in range(0, words.numel(), _DIGEST_WORDS):
        part = words[start : start + _DIGEST_WORDS].to(torch.int64)
        # Odd multipliers make the sum depend on the order of the words.
        total += int((part * torch.arange(1, 2 * part.numel(), 2)).sum()) * (2 * start + 1)
    return total
