"""FSDP2's groups of parameters of a stage: weights are gathered once for all microbatches, gradients reduced once.

Unsharded weights stay from the first microbatch's forward to the last one's, and so in backward. Gradients of all but
the last backward are added up unsharded, in the dtype in which they are reduced, as in an accumulation window;
those of the root by autograd itself, in the dtype in which it computes.
"""

from typing import Any

from torch import nn

from torchacc.engines.native.parameter_groups import Group, Groups
from torchacc.engines.patches.private_names import TrainingState


class MicrobatchGroup(Group):
    """The parameters of one unit, which runs once for each microbatch."""

    owner: "MicrobatchGroups"
    _num_to_come = 0
    """Backwards of this unit for which a forward has run: too many, where a script has dropped a loss."""

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather, unless the microbatch before has left the weights; count the backward that will follow."""
        found = super().pre_forward(module, args, kwargs)
        has_backward = found[0] is not args or found[1] is not kwargs  # FSDP2 has put its node around an input
        self._num_to_come += has_backward
        return found

    def post_backward(self, *unused: Any) -> None:
        """Reduce gradients after the last microbatch's backward; until then add them up."""
        self._num_to_come = 0 if self.is_last else max(0, self._num_to_come - 1)  # more come of a retained graph
        if not self._num_to_come:
            super().post_backward(*unused)
            return
        before = self.reduce_grads, self.reshard_after_backward
        self.reduce_grads = self.reshard_after_backward = False
        try:
            super().post_backward(*unused)
        finally:
            self.reduce_grads, self.reshard_after_backward = before
        # Else FSDP2 would take the unit for done, and not reduce at the end of backward what is left then.
        self._training_state = TrainingState.IDLE

    def _may_reuse(self) -> bool:
        return super()._may_reuse() or self._training_state is TrainingState.FORWARD

    def _is_done_after_forward(self) -> bool:
        return not self.owner.has_more and super()._is_done_after_forward()


class MicrobatchGroups(Groups):
    """All groups of a stage."""

    group_class = MicrobatchGroup
    has_more = False
    """Whether another microbatch follows in the forward that runs."""
