"""FSDP2's groups of parameters of a stage: weights are gathered once for all microbatches of a batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchacc.engines.native.parameter_groups import Groups
from torchacc.engines.native.unit_parameters import Group


class MicrobatchGroup(Group):
    """The parameters of one unit, which runs once for each microbatch."""

    owner: "MicrobatchGroups"

    def reshard(self) -> None:
        """Let modules show their shards; keep unsharded weights for the next microbatch."""
        if self.owner.keeps_weights:
            self._hide()
        else:
            super().reshard()

    def _may_reuse(self) -> bool:
        return self.owner.keeps_weights or super()._may_reuse()

    def _to_sharded(self) -> None:
        if self.owner.keeps_weights and self._versions == self.versions_now():
            self._hide()
        else:
            super()._to_sharded()


class MicrobatchGroups(Groups):
    """All groups of a stage."""

    group_class = MicrobatchGroup
    keeps_weights = False
    """Whether unsharded weights stay between the forwards, and backwards, that run."""

    @contextmanager
    def keeping_weights(self, *, until_backward: bool, ahead: bool) -> Iterator[None]:
        """Hold a context in which each unit is gathered once, for all forwards and backwards in it.

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
                if not until_backward or group._is_done_after_forward():
                    group._to_sharded()

    def _gather_ahead(self) -> None:
        """Gather all units; modules show their shards until they run."""
        for group in self._all_groups():
            group.unshard()
        for group in self._all_groups():
            group.wait_for_unshard()
            group._hide()
