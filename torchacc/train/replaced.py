"""Put what a run has written into its folder aside, and remove it: that alone, and nothing that lies beside it."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from torchacc.checkpoint.format.removal import foreign_names, listed, remove
from torchacc.logging import get_logger

_log = get_logger(__name__)

_FILES = (
    *("run.json", ".run.json", "finished.json", ".finished.json", ".lock"),
    *("metrics.jsonl", "metrics.renewed", "report.html", "wandb_id"),
)
_FOLDERS = {
    "logs": re.compile(r"rank-\d{5}\.log"),
    "tensorboard": re.compile(r"events\.out\.tfevents\..+"),
}
"""Folders of files that a run writes, and their names."""
_CHECKPOINTS = {
    ".": re.compile(r"final|\.final\.[^.]+\.(incomplete|replaced|removed)"),
    "checkpoints": re.compile(r"step-\d{8,}|\.step-\d{8,}\.([^.]+\.(incomplete|replaced|removed)|pruned)"),
}
"""Folders of checkpoints that a run writes, and their names."""


def has_checkpoints(folder: Path) -> bool:
    """Return whether a run has left checkpoints, or what was to become one."""
    return any(path.parent != folder for path in _checkpoints(folder))


def foreign_in_checkpoints(folder: Path) -> list[str]:
    """Return what lies in a run's checkpoints and is not of them, so that they cannot be removed."""
    return [
        f"{checkpoint.relative_to(folder)}/{name}"
        for checkpoint in _checkpoints(folder)
        if not checkpoint.name.startswith(".")
        for name in foreign_names(checkpoint)
    ]


def put_aside(folder: Path, aside: Path) -> None:
    """Move what a run has written to a folder of its own, which is not there yet."""
    for path in [*_files(folder), *_checkpoints(folder)]:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    for name in (*_FOLDERS, "checkpoints"):
        with suppress(OSError):
            (folder / name).rmdir()


def drop(aside: Path) -> None:
    """Remove what `put_aside()` has moved; whatever else lies there stays. Never raises."""
    if not aside.is_dir():
        return
    for path in _checkpoints(aside):
        remove(path)
    for path in _files(aside):
        with suppress(OSError):
            path.unlink()
    for folder in (*(aside / name for name in (*_FOLDERS, "checkpoints")), aside):
        with suppress(OSError):
            folder.rmdir()
    with suppress(OSError):
        names = sorted(path.name for path in aside.iterdir())
        _log.warning("%s stays, as %s in it is of no run: move or remove it yourself", aside, listed(names))


def _files(folder: Path) -> Iterator[Path]:
    yield from (folder / name for name in _FILES if (folder / name).is_file())
    for name, pattern in _FOLDERS.items():
        yield from (path for path in _matching(folder / name, pattern) if not path.is_dir())


def _checkpoints(folder: Path) -> Iterator[Path]:
    for name, pattern in _CHECKPOINTS.items():
        yield from (path for path in _matching(folder / name, pattern) if path.is_dir() and not path.is_symlink())


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    if not folder.is_dir() or folder.is_symlink():
        return []
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))
