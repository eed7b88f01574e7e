"""A stage's folder: what a run writes there, whose run it holds, whether that has finished, and how it is replaced.

Nothing in it is ever overwritten unasked, and nothing that the run has not written is ever removed.
"""

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchacc.checkpoint.own_format.removal import foreign_names, remove
from torchacc.config.text_file import read_json
from torchacc.errors import ConfigError, listed, shown
from torchacc.logging import get_logger
from torchacc.train.metric_sinks import read_metrics

if TYPE_CHECKING:
    from torchacc.train.stage import StageRun

_log = get_logger(__name__)

RUN = "run.json"
"""File that names the run whose folder it is."""
FINISHED = "finished.json"
"""File that a run leaves when it has come to its end."""
METRICS = "metrics.jsonl"
"""File of what a run has measured."""
REPORT = "report.html"
"""File of the curves and facts of a run, written at its end."""
LOGS = "logs"
"""Folder of the logs of each rank, which another rank may make first."""
TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's event files."""
WANDB_ID = "wandb_id"
"""File that names the run at Weights & Biases."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints that a run goes on from."""
FINAL = "final"
"""Folder of the checkpoint that a finished run leaves."""
_LOCK = ".lock"


@dataclass(frozen=True)
class _Written:
    """What a run writes into a folder of its own folder: the names of files, or of folders that are checkpoints."""

    folder: str
    names: re.Pattern[str]
    is_checkpoint: bool = False


_UNFINISHED = r"[^.]+\.(incomplete|replaced|removed)"
_WRITTEN = (
    _Written(".", re.compile(r"\.?(run|finished)\.json|\.lock|metrics\.(jsonl|renewed)|report\.html|wandb_id")),
    _Written(LOGS, re.compile(r"rank-\d{5}\.log")),
    _Written(TENSORBOARD, re.compile(r"events\.out\.tfevents\..+")),
    _Written(".", re.compile(rf"final|\.final\.{_UNFINISHED}"), is_checkpoint=True),
    _Written(CHECKPOINTS, re.compile(rf"step-\d{{8,}}|\.step-\d{{8,}}\.({_UNFINISHED}|pruned)"), is_checkpoint=True),
)
"""All that a run writes, and `--overwrite` removes; but for a log file and what Weights & Biases keeps."""
RESERVED = (RUN, FINISHED, METRICS, REPORT, LOGS, TENSORBOARD, "wandb", WANDB_ID, CHECKPOINTS, FINAL)
"""Names in the folder that a log file cannot have."""


def is_finished(folder: Path) -> bool:
    """Return whether a stage's folder holds a run that has come to its end."""
    return (folder / FINISHED).is_file()


def mark_finished(folder: Path, facts: dict[str, Any]) -> None:
    """Record that a run has come to its end, with what is worth knowing of it. By one process."""
    _write(folder / FINISHED, {"at": _now(), **facts})


def check_folder(run: "StageRun", *, overwrite: bool = False) -> None:
    """Check that a run may have its folder: it is new, or empty, or holds this run, not finished.

    Raises:
        ConfigError: It holds something else.
    """
    folder = run.folder
    if not folder.exists() or not any(path.name not in (LOGS, _LOCK) for path in folder.iterdir()):
        return
    if not (folder / RUN).is_file():
        raise ConfigError(
            f"output folder {folder} holds {_first(folder)}, and no {RUN}: no run has written it, so that none "
            "may write there; change output_dir, or move it away"
        )
    with lock_folder(folder):  # another run's may not be taken, whatever it is
        pass
    identity = _identity(folder)
    if overwrite and (foreign := _foreign_in_checkpoints(folder)):
        raise ConfigError(
            f"output folder {folder}: {listed(foreign)} is not of the checkpoint that it lies in, and --overwrite "
            "removes nothing that the run has not written: move it, or change output_dir"
        )
    if overwrite or not _has_begun(run):
        return
    if is_finished(folder):
        raise ConfigError(
            f"output folder {folder} holds a finished run; pass --overwrite to remove it and train again, or change "
            "output_dir"
        )
    differing = _differing(identity, run.identity())
    if differing:
        raise ConfigError(
            f"output folder {folder} holds a run that differs, so that this one cannot go on from it: "
            f"{'; '.join(differing)}. Pass --overwrite to remove it, or change output_dir"
        )
    if not run.resumes and _has_checkpoints(folder):
        raise ConfigError(
            f"output folder {folder} holds checkpoints, and training.resume = 'never' would start at step 0 among "
            "them: pass --overwrite to remove them, write resume: auto, or change output_dir"
        )


def take_folder(run: "StageRun", *, overwrite: bool = False) -> None:
    """Make a run's folder and note whose it is. By one process, before any of them starts.

    Args:
        run: The run.
        overwrite: Whether to put the run that the folder holds aside; `drop_replaced()` removes it. What the run has
            not written stays where it is.

    Raises:
        ConfigError: It holds something else, or cannot be written.
    """
    check_folder(run, overwrite=overwrite)
    try:
        if overwrite and _has_begun(run):
            drop_replaced(run)
            _put_aside(run.folder, _replaced(run))
        run.folder.mkdir(parents=True, exist_ok=True)
        if not _has_begun(run):  # a run that never came to train does not bind the one that does
            facts = {"identity": run.identity(), "options": run.options(), "plan": str(run)}
            _write(run.folder / RUN, {"at": _now(), "stage": run.stage, **facts})
    except (OSError, ValueError) as error:
        raise ConfigError(f"output folder {run.folder} cannot be written: {error}; change output_dir") from None


def drop_replaced(run: "StageRun") -> None:
    """Remove the run that this one has replaced; whatever else lies there stays. By one process. Never raises."""
    aside = _replaced(run)
    if not aside.is_dir():
        return
    for path, is_checkpoint in _written(aside):
        with suppress(OSError):
            remove(path) if is_checkpoint else path.unlink()
    _remove_empty(aside)
    with suppress(OSError):
        aside.rmdir()
    with suppress(OSError):
        names = sorted(path.name for path in aside.iterdir())
        _log.warning("%s stays, as %s in it is of no run: move or remove it yourself", aside, listed(names))


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Context manager in which no other run trains in a folder that exists; it ends with the process at the latest.

    Raises:
        ConfigError: Another one does.
    """
    with (folder / _LOCK).open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output folder {folder}: another process is training there; wait for its end, or change output_dir"
            ) from None
        except OSError as error:  # a file system without locks
            _log.debug("%s is not locked: %s", folder, error)
        yield


def _has_begun(run: "StageRun") -> bool:
    """Return whether a folder holds anything that was trained or measured."""
    if is_finished(run.folder) or run.final.exists() or _has_checkpoints(run.folder):
        return True
    return any("loss" in row for row in read_metrics(run.folder / METRICS))


def _has_checkpoints(folder: Path) -> bool:
    """Return whether a run has left checkpoints, or what was to become one."""
    return any(is_checkpoint and path.parent != folder for path, is_checkpoint in _written(folder))


def _foreign_in_checkpoints(folder: Path) -> list[str]:
    """Return what lies in a run's checkpoints and is not of them, so that they cannot be removed."""
    return [
        f"{path.relative_to(folder)}/{name}"
        for path, is_checkpoint in _written(folder)
        if is_checkpoint and not path.name.startswith(".")
        for name in foreign_names(path)
    ]


def _put_aside(folder: Path, aside: Path) -> None:
    """Move what a run has written to a folder of its own, which is not there yet."""
    for path, _ in list(_written(folder)):
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    _remove_empty(folder)


def _written(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield what a run has written into its folder, and whether it is a checkpoint."""
    for written in _WRITTEN:
        within = folder / written.folder
        if not within.is_dir() or within.is_symlink():
            continue
        for path in sorted(within.iterdir()):
            is_right = path.is_dir() and not path.is_symlink() if written.is_checkpoint else not path.is_dir()
            if is_right and written.names.fullmatch(path.name):
                yield path, written.is_checkpoint


def _remove_empty(folder: Path) -> None:
    for name in {written.folder for written in _WRITTEN} - {"."}:
        with suppress(OSError):
            (folder / name).rmdir()


def _replaced(run: "StageRun") -> Path:
    return run.folder.with_name(f".{run.folder.name}.replaced")


def _identity(folder: Path) -> dict[str, Any]:
    try:
        facts = read_json(folder / RUN)
        identity = facts.get("identity") if isinstance(facts, dict) else None
        if not isinstance(identity, dict) or not isinstance(facts.get("stage"), str):
            raise ConfigError("it names no run")
    except ConfigError as error:
        raise ConfigError(
            f"output folder {folder}: {RUN}, which says whose run it holds, cannot be read ({error}), so that nothing "
            "there is known to be a run's: move it away, or change output_dir"
        ) from None
    return identity


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    now = json.loads(json.dumps(now))
    absent = "nothing"
    return [
        f"{name} was {shown(before.get(name, absent))} and is {shown(now.get(name, absent))}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name, absent) != now.get(name, absent)
    ]


def _first(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _write(path: Path, values: dict[str, Any]) -> None:
    written = path.with_name(f".{path.name}")
    written.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    written.replace(path)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
