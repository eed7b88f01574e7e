"""Remove checkpoints: the files that a manifest, or a save that was cut short, lists as its own, and never another.

All of the package that deletes a checkpoint does it here. What somebody else has put beside a checkpoint's files stays.
"""

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torchacc.checkpoint.own_format.manifest import MANIFEST, leftovers, locate, read_manifest
from torchacc.errors import CheckpointError, listed
from torchacc.logging import get_logger

_log = get_logger(__name__)

_SAVE = "torchacc-save.json"
"""File that names what a save is going to write, from before the first of it until the manifest does."""
_MARK = re.compile(r"rank-\d+\.(writing|done|failed)")


def write_save_intent(folder: Path, names: Iterable[str]) -> None:
    """Record in a new folder what a save is going to write there, so that it can be told apart if it is cut short."""
    (folder / _SAVE).write_text(json.dumps(sorted(names)), encoding="utf-8")


def remove_save_intent(folder: Path) -> None:
    """Remove what `write_save_intent()` wrote, and the marks of ranks, once a manifest says what is in the folder."""
    for name in _names(folder):
        if name == _SAVE or _MARK.fullmatch(name):
            (folder / name).unlink()


def foreign_names(folder: Path) -> list[str]:
    """Return the names of what lies in a checkpoint's folder and is not of the checkpoint: all, where no one knows."""
    return sorted(set(_names(folder)) - _own(folder))


def remove(folder: Path, *, successor: Path | None = None) -> None:
    """Remove a checkpoint's own files, and its folder where nothing else is in it. Never raises.

    Args:
        folder: The checkpoint, whole or half written, by a hidden name that no one but a save gives.
        successor: The checkpoint in its place: what is not of the removed one, if that is complete, is moved there.
    """
    own = _own(folder)
    if MANIFEST not in own:
        successor = None
    for name in sorted(own, key=lambda name: name in (MANIFEST, _SAVE)):  # these last: they say what is left
        with suppress(OSError):
            (folder / name).unlink()
    for name in _names(folder):
        if successor is not None and name not in own and successor.is_dir() and not (successor / name).exists():
            with suppress(OSError):
                (folder / name).rename(successor / name)
    with suppress(OSError):
        folder.rmdir()
    if left := _names(folder):
        _log.warning("%s stays, as %s in it is not of a checkpoint: move or remove it yourself", folder, listed(left))


def _own(folder: Path) -> set[str]:
    """Return the names of the files that are provably of the checkpoint in a folder."""
    found = {_SAVE}
    with suppress(CheckpointError):
        found |= {MANIFEST, *read_manifest(folder)["files"]}
    with suppress(OSError, ValueError, TypeError, RecursionError):
        announced = json.loads((folder / _SAVE).read_text(encoding="utf-8"))
        found |= {name for name in announced if Path(name).name == name}
        found |= set(filter(_MARK.fullmatch, _names(folder)))
    return found


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def recover_interrupted(path: Path) -> None:
    """Complete a replacement that was cut short, and remove what interrupted saves of a path have left."""
    if not path.exists():
        with suppress(CheckpointError):
            locate(path).rename(path)
    for other in leftovers(path, "incomplete", "replaced"):
        # By another name first: a run that is still saving must not complete what is half removed.
        with suppress(OSError):
            other.rename(other.with_suffix(".removed"))
    for other in leftovers(path, "removed"):
        remove(other, successor=path)
