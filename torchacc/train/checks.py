"""What a run needs from the world: files, folders, other stages. All of it is looked at before anything is started."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchacc.checkpoint.format.checkpoint_folder import Folder
from torchacc.config.sections import did_you_mean
from torchacc.config.yaml_file import YamlFile
from torchacc.errors import CheckpointError, ConfigError, DataError, shown
from torchacc.train.config import StageConfig, TextConfig
from torchacc.train.documents import check_text
from torchacc.train.folder import is_finished
from torchacc.train.hub import is_path
from torchacc.train.tokens import load_tokenizer


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


def check_model(
    source: YamlFile, at: str, data: TextConfig, name: str, model: Mapping[str, Any], weights: Path | str | None
) -> None:
    """Check that a model can be built, that the data's examples fit it, and that it has a vocabulary for their tokens.

    Args:
        source: The training file.
        at: The stage's place in it.
        data: The stage's text.
        name: Name of the model config.
        model: The model config.
        weights: What the run starts from, whose tokenizer the text may have: a folder, or a name on the hub.
    """
    from torchacc.train.models import planned_config
    from torchacc.train.text import check_model as check_examples

    try:
        config = planned_config(model)
    except ConfigError as error:
        raise ConfigError(source.at(f"{name}: {error}")) from None
    if config is None:
        return
    try:
        check_examples(data, config)
        num_tokens = _num_tokens(data, weights)
    except (ConfigError, DataError) as error:
        option = f"{at}.{str(error).split(maxsplit=1)[0].rstrip(':')}"
        is_given = option in source.lines  # else the stage's line is the nearest
        raise ConfigError(source.at(f"{at}.{error}" if is_given else f"{at}: {error}")) from None
    if {"vocab_size", "pretrained"} & model.keys() and num_tokens is not None and config.vocab_size < num_tokens:
        option, instead = (
            f"{name}.pretrained = {shown(model.get('pretrained'))}",
            f"choose a {at}.data.tokenizer that fits",
        )
        if "vocab_size" in model:
            option, instead = f"{name}.vocab_size = {config.vocab_size}", f"write {num_tokens}, or leave it out"
        raise ConfigError(
            source.at(
                f"{option}: the model has {config.vocab_size} tokens, and the text's tokenizer up to {num_tokens}; "
                f"{instead}"
            )
        )


def _num_tokens(data: TextConfig, weights: Path | str | None) -> int | None:
    """Return how many tokens the text's tokenizer has, or may get; None where only the hub knows."""
    tokenizer = data.tokenizer
    if tokenizer is None and weights is not None:
        folder = Path(weights).expanduser()
        if not folder.is_dir():
            return None
        tokenizer = str(folder) if (folder / "tokenizer_config.json").is_file() else None
    if tokenizer is None:
        return data.vocab_size
    return len(load_tokenizer(tokenizer)) if Path(tokenizer).expanduser().is_dir() else None


def check_stopping(source: YamlFile, at: str, stage: StageConfig) -> None:
    """Check that there are evaluations for a stage to be stopped by."""
    training, data = stage.training, stage.data
    if training.early_stopping is None:
        return
    if data.validation is None and not data.validation_share:
        raise ConfigError(
            source.at(f"{at}.training.early_stopping: there is nothing to evaluate on; give data.validation")
        )
    every = training.eval_every_steps
    if every is None or every >= (training.max_steps or math.inf):
        instead = "give" if every is None else f"it has {training.max_steps} steps: write less than {every} as"
        raise ConfigError(
            source.at(
                f"{at}.training.early_stopping: the stage is evaluated at its end only; {instead} eval_every_steps"
            )
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


def check_pretrained(source: YamlFile, at: str, given: str) -> None:
    """Check that a folder holds a model that transformers has saved; a name on the hub may be anything."""
    folder = Path(given).expanduser()
    if not given or ((is_path(given) or folder.exists()) and not folder.is_dir()):
        raise ConfigError(source.at(f"{at}: there is no such folder; write a model's folder, or its name on the hub"))
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(source.at(f"{at}: {folder} has no config.json, so that it holds no model of transformers"))
    _check_weights(source, at, folder)


def check_resumable(source: YamlFile, at: str, folder: Path) -> None:
    """Check that a folder holds a checkpoint of an interrupted run, and not weights alone."""
    _check_weights(source, at, folder)
    with Folder(folder) as checkpoint:
        absent = [name for name in ("optimizer.json", "state.json") if not checkpoint.has(name)]
    if absent:
        raise ConfigError(
            source.at(
                f"{at}: {folder} has no {' and no '.join(absent)}, so that no run can go on from it; to start from its "
                "weights alone, write init_from"
            )
        )


def _check_weights(source: YamlFile, at: str, folder: Path) -> None:
    try:
        with Folder(folder):
            pass
    except CheckpointError as error:
        raise ConfigError(source.at(f"{at}: {error}")) from None


def checkpoint_name(source: YamlFile, at: str, given: str, stages: Iterable[str]) -> Path | str:
    """Return a checkpoint's folder where there is one, else a name on the hub."""
    folder = Path(given).expanduser()
    if not given:
        raise ConfigError(source.at(f"{at}: write a stage, a folder or a name on the hub; or null for new weights"))
    if folder.is_dir():
        _check_weights(source, at, folder)
        return folder
    hint = did_you_mean(given, stages)
    if is_path(given) or folder.exists() or hint:
        raise ConfigError(
            source.at(f"{at}: there is no such stage and no such folder; {hint or 'stages: ' + ', '.join(stages)}")
        )
    return given
