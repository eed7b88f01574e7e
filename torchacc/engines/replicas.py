"""See to it that all processes start from the same model."""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from torchacc.engines import deferred
from torchacc.engines.process_group import ProcessGroup
from torchacc.errors import ConfigError
from torchacc.logging import get_logger

_log = get_logger(__name__)

T = TypeVar("T")

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
    for name, rank, first, other in _differences({n: tuple(tensor.shape) for n, tensor in state.items()}, group):
        raise ConfigError(
            f"the processes built different models: {name!r} has the shape {first} on rank 0 and {other} on rank {rank}"
        )


def _check_recipes(model: nn.Module, group: ProcessGroup) -> None:
    for name, rank, _, _ in _differences(deferred.fingerprints(model), group):
        raise ConfigError(
            f"deferred_init() on rank {rank} would give {name!r} other values than on rank 0: call "
            "torch.manual_seed() with the same number on every rank before it"
        )


def _differences(own: dict[str, T], group: ProcessGroup) -> Iterator[tuple[str, int, T | None, T | None]]:
    """Yield where a rank's entries are not rank 0's: name, rank, rank 0's and the rank's. Collective: every process."""
    first, *others = group.all_gather_objects(own)
    for rank, other in enumerate(others, start=1):
        for name in (*other, *first):
            if other.get(name) != first.get(name):
                yield name, rank, first.get(name), other.get(name)


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
