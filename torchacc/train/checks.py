"""What a run needs from the world: files, folders, other stages. All of it is looked at before anything is started."""

import os
from collections.abc import Iterable
from pathlib import Path

from torchacc.config.sections import did_you_mean
from torchacc.config.yaml_file import YamlFile
from torchacc.errors import ConfigError, DataError
from torchacc.train.config import StageConfig, TextConfig
from torchacc.train.folder import is_finished
from torchacc.train.sources import check_text, is_path


def check_data(source: YamlFile, at: str, data: TextConfig) -> None:
    """Check that the data's files are there and hold text, and that its options go together."""
    try:
        check_text(data)
    except DataError as error:
        raise ConfigError(source.at(f"{at.removesuffix('data')}{error}")) from error


def check_length(source: YamlFile, at: str, stage: StageConfig) -> None:
    """Check that a run has one length, which can be known, and that the warm-up fits into it."""
    training = stage.training
    if training.max_steps is not None and training.num_epochs is not None:
        raise ConfigError(
            source.at(
                f"{at}.training.num_epochs = {training.num_epochs}: and max_steps = {training.max_steps}; keep one"
            )
        )
    warmup = stage.scheduler.warmup_steps
    if training.max_steps is not None and warmup > training.max_steps:
        raise ConfigError(
            source.at(
                f"{at}.scheduler.warmup_steps = {warmup}: the stage has {training.max_steps} steps, so that its "
                "learning rate would never be reached"
            )
        )
    if stage.data.streaming and training.max_steps is None:
        raise ConfigError(
            source.at(f"{at}.data.streaming = True: nobody knows how long the data is; give training.max_steps")
        )


def check_writable(folder: Path) -> None:
    """Check that a folder can be made and written to, without making it."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"output folder {folder}: {existing} is a file; change output_dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output folder {folder}: {existing} cannot be written to; change output_dir")


def check_finished(source: YamlFile, at: str, stage: str, folder: Path) -> None:
    """Check that a stage that another starts from has come to its end."""
    if is_finished(folder):
        return
    state = "has not finished" if folder.exists() else "has not been trained"
    raise ConfigError(source.at(f"{at}: that stage {state} in {folder}: run it first, with --stage {stage}"))


def checkpoint_name(source: YamlFile, at: str, given: str, stages: Iterable[str]) -> Path | str:
    """Return a checkpoint's folder where there is one, else a name on the hub."""
    folder = Path(given).expanduser()
    if folder.is_dir():
        return folder
    hint = did_you_mean(given, stages)
    if is_path(given) or hint:
        raise ConfigError(
            source.at(f"{at}: there is no such stage and no such folder; {hint or 'stages: ' + ', '.join(stages)}")
        )
    return given
