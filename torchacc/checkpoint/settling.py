"""Bring in order what saves that were cut short have left of a checkpoint."""

from contextlib import suppress
from pathlib import Path

from torchacc.checkpoint.manifest import leftovers, locate
from torchacc.checkpoint.removal import remove
from torchacc.errors import CheckpointError


def settle(path: Path) -> None:
    """Complete a replacement that was cut short, and remove what interrupted saves of a path have left."""
    if not path.exists():
        with suppress(CheckpointError):
            locate(path).rename(path)
    for other in leftovers(path, "incomplete", "replaced"):
        # By another name first, lest a run that is still saving complete what is half removed.
        with suppress(OSError):
            other.rename(other.with_suffix(".removed"))
    for other in leftovers(path, "removed"):
        remove(other, heir=path)
