"""Take the norms of full gradients in PyTorch's own clipping, where each process holds a shard of them."""

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils import clip_grad

from torchacc.engines.patches import torch_patches
from torchacc.engines.sharded_model import ShardedModel

TotalNorm = Callable[[Sequence[torch.Tensor], float], torch.Tensor | None]
"""Returns the norm of full gradients, of an order, from their shards; None where they belong to another engine."""

_norms: WeakKeyDictionary[ShardedModel, tuple[bool, TotalNorm]] = WeakKeyDictionary()
"""For each model its norm, and whether others are asked first: such a norm takes any shard for one of its model."""


def register_total_norm(model: ShardedModel, total_norm: TotalNorm, *, knows_its_own: bool = False) -> None:
    """Patch PyTorch's clipping, however a script has imported it, to take the norm of a model's gradients from shards.

    Args:
        model: The model.
        total_norm: Of its engine: it knows the gradients of other models of the engine, too.
        knows_its_own: Whether it returns None of others' gradients, so that it can be asked first.
    """
    _norms[model] = not knows_its_own, total_norm
    _hold_patch()
    nn.utils.clip_grad_norm_ = clip_grad.clip_grad_norm_  # torch_xla's import, which may come late, puts its own there


@functools.cache
def _hold_patch() -> None:
    torch_patches.hold_until_exit(torch_patches.total_norm_over_shards(_checked_norm))


def _checked_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    """Return the norm of gradients, or None where none of them is a shard.

    Raises:
        EngineError: They are those of an accumulation window that was not completed.
    """
    given = {id(gradient) for gradient in gradients}
    for model in _norms:
        if any(id(parameter.grad) in given for parameter in model.model.parameters()):
            model.status.check_window("clip_grad_norm_()")
            model.expect_clipping("torch.nn.utils.clip_grad_norm_()")
    found = (total_norm(gradients, norm_type) for _, total_norm in sorted(set(_norms.values()), key=itemgetter(0)))
    return next((norm for norm in found if norm is not None), None)
