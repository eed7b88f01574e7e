"""What the rows that a run measures are written to: `metrics.jsonl`, TensorBoard, Weights & Biases."""

import importlib.util
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torchacc.config.text_file import read_text
from torchacc.errors import ConfigError, in_one_line, shown
from torchacc.train.config import LoggingConfig, WandbConfig

_MAX_BYTES = 1 << 30

Row = dict[str, Any]
"""What was measured at a step, by name."""


class MetricSink(Protocol):
    """Something that keeps or draws what is measured."""

    def write(self, rows: Iterable[Row]) -> None:
        """Take in rows."""

    def close(self, *, failed: bool) -> None:
        """Send what is left, and say how the run ended."""


def check_packages(logging: LoggingConfig, wandb: WandbConfig) -> None:
    """Check that what the options ask for is installed; nothing is imported.

    Raises:
        ConfigError: It is not.
    """
    needed = {
        "tensorboard": logging.tensorboard and "logging.tensorboard = True",
        "wandb": wandb.use_wandb and "wandb.use_wandb = True",
    }
    for package, option in needed.items():
        if option and not _is_installed(package):
            raise ConfigError(
                f"{option} needs the package {package}, which is not installed: `pip install 'torchacc[{package}]'`, "
                "or set it to False"
            )


def read_metrics(path: Path) -> list[Row]:
    """Return the lines of a file `metrics.jsonl`; none where there is no file. One that a crash cut off is left out.

    Raises:
        ConfigError: Another line is not what a run has measured; names it.
    """
    if not path.exists():
        return []
    lines = read_text(path, _MAX_BYTES).split("\n")
    return [_read_line(path, i, line) for i, line in enumerate(lines[:-1], 1)]


def _read_line(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
        problem = "expected an object with a step"
    except (ValueError, RecursionError) as error:
        problem = in_one_line(error)
    raise ConfigError(
        f"{path}:{number}: {shown(line)} is nothing that a run has measured: {problem}; move the file away"
    )


class MetricsFile:
    """`metrics.jsonl` of a stage that is running; it is added to line by line, each written whole."""

    def __init__(self, path: Path, *, resumed_at: int) -> None:
        """Open the file, and cut off what a run before had measured after the step that this one goes on from.

        Args:
            path: The file.
            resumed_at: That step; 0 for a run that starts, whose file is empty.
        """
        self._path = path
        self.kept = [row for row in read_metrics(path) if row["step"] <= resumed_at] if resumed_at else []
        renewed = path.with_suffix(".renewed")
        renewed.write_text("".join(map(_line, self.kept)), encoding="utf-8")
        os.replace(renewed, path)
        self._file = path.open("ab", buffering=0)

    def write(self, rows: Iterable[Row]) -> None:
        """Add rows, each by one write; what is not finite is null."""
        for row in rows:
            self._file.write(_line(row).encode())

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()

    def read(self) -> list[Row]:
        """Return all rows, those of the runs before included."""
        return read_metrics(self._path)


def _line(row: Mapping[str, Any]) -> str:
    values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(values, allow_nan=False) + "\n"


class TensorBoardFiles:
    """TensorBoard's event files.

    Args:
        folder: Where they lie.
        resumed_at: The step that the run goes on from; what was measured after it is dropped.
    """

    def __init__(self, folder: Path, *, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def write(self, rows: Iterable[Row]) -> None:
        """Add rows."""
        for row in rows:
            for name, value in _numbers(row).items():
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        """Close the files."""
        self._writer.close()


class WandbRun:
    """A run at Weights & Biases, or kept for it.

    Args:
        folder: The stage's folder.
        id_file: The file that names the run, for one that goes on.
        options: As what.
        facts: What is shown of the run beside its curves.
        resumes: Whether the run goes on from a checkpoint.

    Raises:
        ConfigError: Weights & Biases cannot start.
    """

    def __init__(
        self, folder: Path, id_file: Path, options: WandbConfig, facts: Mapping[str, Any], *, resumes: bool
    ) -> None:
        import wandb

        known = id_file.read_text(encoding="utf-8") if resumes and id_file.exists() else None
        try:
            self._run = wandb.init(
                project=options.project,
                name=f"{folder.parent.name}/{folder.name}",
                tags=options.tags,
                config=dict(facts),
                dir=folder,
                id=known,
                resume="allow" if known else None,
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb.use_wandb = True, and Weights & Biases cannot start: {error} WANDB_MODE=offline keeps the run "
                "in its folder"
            ) from error
        id_file.write_text(self._run.id, encoding="utf-8")
        # By our step and not by its own, which cannot go back to the step of a checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, rows: Iterable[Row]) -> None:
        """Send rows."""
        for row in rows:
            if numbers := _numbers(row):
                self._run.log({**numbers, "step": row["step"]})

    def close(self, *, failed: bool) -> None:
        """Say how the run ended."""
        self._run.finish(exit_code=int(failed))


def _numbers(row: Row) -> dict[str, float]:
    """Return what can be drawn, in two groups: of training, and of evaluation."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in numbers.items()
    }


def _is_installed(package: str) -> bool:
    # A folder of that name in the working directory, such as wandb's own, is found too, as a package without an origin.
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
