"""Unshard weights of a program that XLA partitions: a change of how they are annotated becomes an all-gather."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchacc.engines.xla.gather import Gatherer, Weight, lost_edit
from torchacc.engines.xla.partition import Spec
from torchacc.parallel.axes import ParameterSpec, Role, restricted_to

Annotate = Callable[[torch.Tensor, Spec], None]
"""Says how a tensor of the program is split."""


class AnnotatedGatherer(Gatherer):
    """Unshards weights by annotation: XLA turns the change of sharding into an all-gather."""

    def __init__(
        self,
        weights: Sequence[Weight],
        annotate: Annotate,
        specs: Mapping[torch.Tensor, ParameterSpec],
        stay: Sequence[Role],
        *,
        reshard_after_forward: bool,
    ) -> None:
        super().__init__(weights)
        self._annotate = annotate
        self._specs = specs
        self._stay = stay
        self.keeps_weights = not reshard_after_forward

    def gather(self) -> list[torch.Tensor]:
        """Return the unit's unsharded weights, connected to their shards for autograd."""
        return [self.gather_one(weight.shard, weight) for weight in self.weights]

    def gather_one(self, shard: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return an unsharded weight from a shard, connected to it for autograd."""
        full: torch.Tensor = _Gather.apply(shard, weight, self)
        return full

    def gather_for_backward(self, weight: Weight) -> torch.Tensor:
        """Return an unsharded weight for use in backward."""
        import torch_xla.core.xla_model as xm

        shard = weight.shard.detach().clone()
        # Without the barrier XLA sees that this is the gather of forward, and keeps its result instead.
        xm.optimization_barrier_([shard])
        return self.unshard(shard, weight)

    def unshard(self, shard: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return a weight gathered, but for the axes along which devices compute with different parts of it."""
        if shard.dtype == weight.dtype:
            copy = shard.clone()
        else:
            # Said twice, so that the cast happens before the gather and half as much travels.
            copy = shard.to(weight.dtype)
            self.split(copy, weight)
        self._annotate(copy, restricted_to(self._specs[weight.shard], *self._stay))
        return copy

    def keep_edit(self, weight: Weight, full: torch.Tensor) -> None:
        """Give the shard what the module's own forward has made of the unsharded weight."""
        if full.dtype != weight.shard.dtype:
            raise lost_edit(weight.name, f"it computes with a copy in {full.dtype}, of fewer digits")
        kept = full.detach().clone()
        self.split(kept, weight)
        # Not an edit to autograd, which would miss the weight as it was when it was saved: it was edited before that.
        weight.shard.data.copy_(kept)

    def reduced(self, gradient: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of an unsharded weight as that of its shard."""
        if Role.EXPERT in self._stay:  # or XLA may send activations, and compute experts where they are at rest
            gradient = gradient.clone()
            self._annotate(gradient, restricted_to(self._specs[weight.shard], *self._stay))
        gradient = gradient.clone() if gradient.dtype == dtype else gradient.to(dtype)
        self.split(gradient, weight)
        return gradient

    def split(self, tensor: torch.Tensor, weight: Weight) -> None:
        """Annotate a tensor like a weight's shard."""
        self._annotate(tensor, self._specs[weight.shard])


class _Gather(torch.autograd.Function):
    """Return a split parameter unsharded; split its gradient again, which makes XLA reduce it."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, weight: Weight, gatherer: AnnotatedGatherer) -> torch.Tensor:
        ctx.gatherer, ctx.weight, ctx.dtype = gatherer, weight, shard.dtype
        return gatherer.unshard(weight.with_unique_hash(shard), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.gatherer.reduced(grad, ctx.weight, ctx.dtype), None, None
