"""An error that nothing has caught: which of the job's processes has failed, and which only follow it."""

import sys
import time
from types import TracebackType

import torch.distributed as dist

from torchacc import env
from torchacc.launch import progress

_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Application timeout")
_PATIENCE_SECS = 15.0
"""How long a process that lost a peer waits to be ended by the launcher before it reports on its own."""
_SHOWN_FIRST_SECS = 3.0
"""How long a process waits for the one whose output the launcher shows, which may fail in the same way."""


def install_excepthook(local_rank: int) -> None:
    """Report an uncaught error to the launcher, which prints it last; stay quiet where it only follows another's.

    Args:
        local_rank: This process's. The launcher shows what the first one prints.
    """
    if getattr(sys.excepthook, "_of_torchacc", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if follows_another(error):
            progress.mark(progress.Phase.FOLLOWING)
            time.sleep(_PATIENCE_SECS)
        elif isinstance(error, Exception):
            _record(error)
            error.__traceback__ = traceback  # without the frames of this module
            if local_rank and env.get(progress.FOLDER):
                time.sleep(_SHOWN_FIRST_SECS)
        previous(kind, error, traceback)

    hook._of_torchacc = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def follows_another(error: BaseException) -> bool:
    """Return whether an error, or what it was raised from, says no more than that another process has ended."""
    found: BaseException | None = error
    seen: list[BaseException] = []
    while found is not None and found not in seen:  # an error may be its own cause
        if _is_of_transport(found) and any(text in str(found) for text in _PEER_LOST):
            return True
        seen.append(found)
        found = found.__cause__
    return False


def _is_of_transport(error: BaseException) -> bool:
    """Return whether gloo or torch.distributed's store has raised an error, and not anything else with such words."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "/gloo/" in str(error))


def _record(error: Exception) -> None:
    """Leave the error where `torchrun` looks for the root cause; its recorder reads the error that is being handled."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error
    except Exception:
        get_error_handler().record_exception(error)
