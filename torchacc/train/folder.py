"""A stage's folder: whose run it holds, and whether that has finished. Nothing in it is ever overwritten unasked."""

import json
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchacc.errors import ConfigError

if TYPE_CHECKING:
    from torchacc.train.stage import StageRun

RUN = "run.json"
"""File that names the run whose folder it is."""
FINISHED = "finished.json"
"""File that a run leaves when it has come to its end."""
LOGS = "logs"
"""Folder of the logs of each rank, which another rank may make first."""


def is_finished(folder: Path) -> bool:
    """Return whether a stage's folder holds a run that has come to its end."""
    return (folder / FINISHED).is_file()


def mark_finished(folder: Path, facts: dict[str, Any]) -> None:
    """Note that a run has come to its end, with what is worth knowing of it. By one process."""
    _write(folder / FINISHED, {"at": _now(), **facts})


def check_folder(run: "StageRun", *, overwrite: bool = False) -> None:
    """Check that a run may have its folder: it is new, or empty, or holds this run, not finished.

    Raises:
        ConfigError: It holds something else.
    """
    folder = run.folder
    if not folder.exists() or not any(path.name != LOGS for path in folder.iterdir()):
        return
    if not (folder / RUN).is_file():
        raise ConfigError(
            f"output folder {folder} holds {_first(folder)}, and no {RUN}: no run has written it, so that none "
            "may write there; change output_dir, or move it away"
        )
    if overwrite:
        return
    if is_finished(folder):
        raise ConfigError(
            f"output folder {folder} holds a finished run; pass --overwrite to remove it and train again, or change "
            "output_dir"
        )
    differing = _differing(json.loads((folder / RUN).read_text(encoding="utf-8"))["identity"], run.identity())
    if differing:
        raise ConfigError(
            f"output folder {folder} holds a run that differs, so that this one cannot go on from it: "
            f"{'; '.join(differing)}. Pass --overwrite to remove it, or change output_dir"
        )
    if not run.resumes and run.checkpoints.is_dir() and any(run.checkpoints.iterdir()):
        raise ConfigError(
            f"output folder {folder} holds checkpoints, and training.resume = 'never' would start at step 0 among "
            "them: pass --overwrite to remove them, write resume: auto, or change output_dir"
        )


def take_folder(run: "StageRun", *, overwrite: bool = False) -> None:
    """Make a run's folder and note whose it is. By one process, before any of them starts.

    Args:
        run: The run.
        overwrite: Whether to remove the run that the folder holds.

    Raises:
        ConfigError: It holds something else, or cannot be written.
    """
    check_folder(run, overwrite=overwrite)
    try:
        if overwrite and run.folder.exists():
            shutil.rmtree(run.folder)
        run.folder.mkdir(parents=True, exist_ok=True)
        if not (run.folder / RUN).is_file():
            _write(run.folder / RUN, {"at": _now(), "stage": run.stage, "identity": run.identity(), "plan": str(run)})
    except OSError as error:
        raise ConfigError(f"output folder {run.folder} cannot be written: {error}; change output_dir") from None


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    now = json.loads(json.dumps(now))
    absent = "nothing"
    return [
        f"{name} was {before.get(name, absent)!r} and is {now.get(name, absent)!r}"
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
