"""FSDP2's groups of parameters of a stage: weights are gathered once for all microbatches of a batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchacc.engines.native.fsdp_group import FSDPGroup
from torchacc.engines.native.fsdp_groups import FSDPGroups


class MicrobatchGroup(FSDPGroup):
    """The parameters of one unit, which runs once for each microbatch."""

    owner: "MicrobatchGroups"

    def unshard(self, async_op: bool = False) -> None:
        """Gather, unless an earlier microbatch has left unsharded weights that are still current."""
        if not self._stays_unsharded():
            super().unshard(async_op)

    def reshard(self) -> None:
        """Register the shards on the modules, unless unsharded weights stay for the next microbatch."""
        if not self.owner.keeps_weights:
            super().reshard()

    def _stays_unsharded(self) -> bool:
        is_shown = self.owner.keeps_weights and self.is_unsharded and not self._waits
        return is_shown and self._versions == self.versions_now()

    def _may_reuse(self) -> bool:
        return self.owner.keeps_weights or super()._may_reuse()

    def _to_sharded(self) -> None:
        if not self._stays_unsharded():
            super()._to_sharded()


class MicrobatchGroups(FSDPGroups):
    """All groups of a stage."""

    group_class = MicrobatchGroup
    keeps_weights = False
    """Whether unsharded weights stay between the forwards, and backwards, that run."""

    @contextmanager
    def keeping_weights(self, *, until_backward: bool, ahead: bool) -> Iterator[None]:
        """Context manager in which each unit is gathered once, for all forwards and backwards in it.

        Args:
            until_backward: Whether weights that are not freed after a forward wait for the backward that follows.
            ahead: Whether all are gathered now, as this stage would only wait for what another sends.
        """
        self.begin()
        self.keeps_weights = True
        try:
            if ahead:
                self._gather_ahead()
            yield
        finally:
            self.keeps_weights = False
            for group in self._all_groups():
                if until_backward and not group._is_done_after_forward():
                    group._register_sharded()
                else:
                    group._to_sharded()

    def _gather_for_recorded(self, model: nn.Module) -> None:
        """Do nothing: of what transformers records and returns a model in stages returns nothing."""

    def _gather_ahead(self) -> None:
        """Gather all units."""
        for group in self._all_groups():
            group.unshard()
        for group in self._all_groups():
            group.wait_for_unshard()
