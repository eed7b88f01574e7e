"""TensorBoard and Weights & Biases, each of which is told what `metrics.jsonl` holds."""

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torchacc.errors import ConfigError
from torchacc.train.config import LoggingConfig, WandbConfig
from torchacc.train.history import Row


class Tracker(Protocol):
    """Something that draws curves."""

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


def make_trackers(
    folder: Path, logging: LoggingConfig, wandb: WandbConfig, *, facts: Mapping[str, Any], resumed_at: int
) -> list[Tracker]:
    """Start the trackers that the options ask for.

    Args:
        folder: The stage's folder, where they keep their files.
        logging: Whether TensorBoard.
        wandb: Whether Weights & Biases.
        facts: What they show of the run beside its curves.
        resumed_at: The step that the run goes on from; what was measured after it is dropped.

    Raises:
        ConfigError: Weights & Biases cannot start.
    """
    trackers: list[Tracker] = []
    if logging.tensorboard:
        trackers.append(_TensorBoard(folder / "tensorboard", resumed_at))
    if wandb.use_wandb:
        trackers.append(_Wandb(folder, wandb, facts, resumes=resumed_at > 0))
    return trackers


class _TensorBoard:
    def __init__(self, folder: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            for name, value in _numbers(row).items():
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, options: WandbConfig, facts: Mapping[str, Any], *, resumes: bool) -> None:
        import wandb

        id_file = folder / "wandb_id"
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
        for row in rows:
            if numbers := _numbers(row):
                self._run.log({**numbers, "step": row["step"]})

    def close(self, *, failed: bool) -> None:
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
