"""Find an evaluation between a save and the next step: a run that goes on from the checkpoint would be without it.

A loop over a loader draws a random number, as PyTorch's loaders do. So what the run draws afterwards, such as the order
of its next epoch, would be something else.
"""

from typing import Any

from torchacc.data import AsyncLoader
from torchacc.logging import get_logger

_log = get_logger(__name__)


class EvaluationAfterSave:
    """Warns, once, where a loop over another loader begins after a save, and training goes on."""

    def __init__(self, loader: Any) -> None:
        """Begin to listen.

        Args:
            loader: The loader that is trained on; nothing is found where accelerate() has not returned it.
        """
        self._loader = loader if isinstance(loader, AsyncLoader) else None
        self._saved: tuple[Any, ...] = ()
        """Where the loop was at the last save."""
        self._step = 0
        self._has_begun = self._has_warned = False
        if self._loader is not None:
            AsyncLoader.listeners.add(self)

    def on_save(self, step: int) -> None:
        """Record a save after a step."""
        if self._loader is not None:
            self._saved, self._step, self._has_begun = self._loader.place_in_loop, step, False

    def on_loop(self, loader: AsyncLoader) -> None:
        """Record that a loop over a loader begins."""
        if self._loader is not None and loader is not self._loader and self._saved == self._loader.place_in_loop:
            self._has_begun = True

    def on_step(self, step: int) -> None:
        """Warn where training has gone on to a step."""
        if self._has_begun and step > self._step and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "an evaluation follows the save of step %d, and draws a random number: a run that goes on from that "
                "checkpoint is without it, so that its next epoch has another order, and dropout other places. "
                "Evaluate first, and then call save_if_due()",
                self._step,
            )
