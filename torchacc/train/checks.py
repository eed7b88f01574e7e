"""Check what a stage needs: files, folders, a model that its text fits, a length.

All of it is looked at before anything is started. Each message begins with the option that is wrong, by its path below
the stage or, for a section beside the stages, from the top; `resolve_stage()` puts the file and the line before it.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchacc.checkpoint.own_format.checkpoint_folder import CheckpointFolder
from torchacc.config.names import did_you_mean
from torchacc.errors import CheckpointError, ConfigError, shown
from torchacc.train.config import SchedulerConfig, StageConfig, TextConfig, TrainingConfig
from torchacc.train.documents import NO_DATASETS
from torchacc.train.hub import check_hub, is_on_hub, is_path
from torchacc.train.run_folder import is_finished
from torchacc.train.tokens import load_tokenizer


def check_length(stage: StageConfig) -> None:
    """Check that a run has one length, which can be known, and that the warm-up fits into it."""
    training, warmup = stage.training, stage.scheduler.warmup_steps
    if training.max_steps is not None and training.num_epochs is not None:
        raise ConfigError(
            f"training.num_epochs = {training.num_epochs}: and max_steps = {training.max_steps}; keep one"
        )
    if training.max_steps is not None and warmup > training.max_steps:
        raise ConfigError(
            f"scheduler.warmup_steps = {warmup}: the stage has {training.max_steps} steps, so that its learning rate "
            "would never be reached"
        )
    if stage.data.streaming and training.max_steps is None:
        raise ConfigError("data.streaming = True: nobody knows how long the data is; give training.max_steps")


def check_stopping(stage: StageConfig) -> None:
    """Check that there are evaluations for a stage to be stopped by."""
    training, every = stage.training, stage.training.eval_every_steps
    if training.early_stopping is None:
        return
    if not _has_validation(stage.data):
        raise ConfigError("training.early_stopping: there is nothing to evaluate on; give data.validation")
    if every is None or every >= (training.max_steps or math.inf):
        instead = "give" if every is None else f"it has {training.max_steps} steps: write less than {every} as"
        raise ConfigError(
            f"training.early_stopping: the stage is evaluated at its end only; {instead} eval_every_steps"
        )


def check_model(data: TextConfig, name: str, model: Mapping[str, Any], weights: Path | str | None) -> None:
    """Check that a model can be built, that the data's examples fit it, and that it has a vocabulary for their tokens.

    Args:
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
        raise ConfigError(f"{name}: {error}") from None
    if config is None:
        return
    check_examples(data, config)
    num_tokens = _num_tokens(data, weights)
    if not {"vocab_size", "pretrained"} & model.keys() or num_tokens is None or config.vocab_size >= num_tokens:
        return
    option, instead = f"pretrained = {shown(model.get('pretrained'))}", "choose a data.tokenizer that fits"
    if "vocab_size" in model:
        option, instead = f"vocab_size = {config.vocab_size}", f"write {num_tokens}, or leave it out"
    raise ConfigError(
        f"{name}.{option}: the model has {config.vocab_size} tokens, and the text's tokenizer up to {num_tokens}; "
        f"{instead}"
    )


def check_kernel(data: TextConfig, attention: str) -> None:
    """Check that the kernel that computes attention keeps to one document of a block, where documents are packed apart.

    Args:
        data: The stage's text.
        attention: The value of `compute.attention`.
    """
    if data.packing is True and attention.startswith("flash_attention"):
        raise ConfigError(
            f"compute.attention = {attention!r} with data.packing = true: FlashAttention of transformers does not keep "
            "to one document of a block. Write attention: flex_attention, or packing: concat to let documents see "
            "those before them"
        )


def _num_tokens(data: TextConfig, weights: Path | str | None) -> int | None:
    """Return how many tokens the text's tokenizer has, or may get; None where only the hub knows."""
    tokenizer = data.tokenizer
    if tokenizer is None and weights is not None:
        if not Path(weights).expanduser().is_dir():
            return None
        tokenizer = tokenizer_of(weights)
    if tokenizer is None:
        return data.vocab_size
    return len(load_tokenizer(tokenizer)) if Path(tokenizer).expanduser().is_dir() else None


def tokenizer_of(weights: Path | str | None) -> str | None:
    """Return the folder of weights where it holds a tokenizer too, which is then that of the text; else None."""
    folder = None if weights is None else Path(weights).expanduser()
    return str(folder) if folder is not None and (folder / "tokenizer_config.json").is_file() else None


def check_writable(folder: Path) -> None:
    """Check that a folder can be made and written to, without making it."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"output folder {folder}: {existing} is a file; change output_dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"output folder {folder}: {existing} cannot be written to; change output_dir")


def check_pretrained(option: str, given: str) -> None:
    """Check that a folder holds a model that transformers has saved; a name on the hub may be anything."""
    folder = Path(given).expanduser()
    if not given or ((is_path(given) or folder.exists()) and not folder.is_dir()):
        raise ConfigError(f"{option}: there is no such folder; write a model's folder, or its name on the hub")
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        is_adapter = (Path(folder) / "adapter_config.json").exists()
        instead = "; it holds an adapter of peft: merge it into its base model, and name that" if is_adapter else ""
        raise ConfigError(f"{option}: {folder} has no config.json, so that it holds no model of transformers{instead}")
    _check_weights(option, folder)


def check_resumable(option: str, given: str) -> Path:
    """Return a folder that holds a checkpoint of an interrupted run, and not weights alone."""
    folder = Path(given).expanduser()
    if not given or not folder.is_dir():
        raise ConfigError(f"{option}: there is no such folder; write 'auto', 'never', or a checkpoint's folder")
    _check_weights(option, folder)
    with CheckpointFolder(folder) as checkpoint:
        absent = [name for name in ("optimizer.json", "state.json") if not checkpoint.has(name)]
    if absent:
        raise ConfigError(
            f"{option}: {folder} has no {' and no '.join(absent)}, so that no run can go on from it; to start from its "
            "weights alone, write init_from"
        )
    return folder


def check_finished(option: str, stage: str, folder: Path) -> None:
    """Check that a stage that another starts from has come to its end."""
    if not is_finished(folder):
        state = "has not finished" if folder.exists() else "has not been trained"
        raise ConfigError(f"{option}: that stage {state} in {folder}: run it first, with --stage {stage}")


def checkpoint_name(option: str, given: str, stages: Iterable[str]) -> Path | str:
    """Return a checkpoint's folder where there is one, else a name on the hub."""
    folder = Path(given).expanduser()
    if not given:
        raise ConfigError(f"{option}: write a stage, a folder or a name on the hub; or null for new weights")
    if folder.is_dir():
        _check_weights(option, folder)
        return folder
    hint = did_you_mean(given, stages)
    if is_path(given) or folder.exists() or hint:
        raise ConfigError(
            f"{option}: there is no such stage and no such folder; {hint or 'stages: ' + ', '.join(stages)}"
        )
    return given


def _check_weights(option: str, folder: Path) -> None:
    try:
        with CheckpointFolder(folder):
            pass
    except CheckpointError as error:
        raise ConfigError(f"{option}: {error}") from None


def check_hub_answers(
    data: TextConfig, model_name: str, model: Mapping[str, Any], init_from: Path | str | None
) -> None:
    """Check that the hub answers, where anything is to come from it."""
    given = {
        f"{model_name}.pretrained": model.get("pretrained"),
        "init_from": init_from,
        "data.tokenizer": data.tokenizer,
        "data.dataset": None if data.dataset in NO_DATASETS else data.dataset,
    }
    asked = [(option, name) for option, name in given.items() if isinstance(name, str) and is_on_hub(name)]
    for option, name in asked[:1]:  # the others ask the same hub
        check_hub(option, name)


def options_without_effect(
    data: TextConfig, scheduler: SchedulerConfig, training: TrainingConfig, *, weights: Path | str | None
) -> Iterator[str]:
    """Yield a line for each option that a file gives and nothing looks at: which it is, and why.

    Args:
        data: The stage's text.
        scheduler: Its learning rate.
        training: Its loop.
        weights: What it starts from, whose tokenizer the text has where the folder holds one; None for new weights.
    """
    is_of_weights = data.tokenizer is None and tokenizer_of(weights) is not None
    has_evaluation = _has_validation(data)
    table = [
        (data, "text_column", data.dataset == "stdlib", "stdlib has no columns"),
        (data, "vocab_size", data.tokenizer is not None, "data.tokenizer has its own"),
        (data, "vocab_size", is_of_weights, f"the tokenizer is that of {weights}"),
        (data, "validation_share", data.validation is not None, "data.validation says what to evaluate on"),
        (data, "num_proc", data.streaming, "text that is streamed is tokenized as it is read"),
        (data, "cache_dir", data.streaming, "nothing is kept of text that is streamed"),
        (scheduler, "min_lr_ratio", scheduler.name == "constant", "the learning rate stays"),
        (training, "eval_every_steps", not has_evaluation, "there is nothing to evaluate on"),
        (training, "eval_steps", not has_evaluation, "there is nothing to evaluate on"),
    ]
    for section, name, has_none, reason in table:
        value = getattr(section, name)
        if has_none and name in section.model_fields_set and value != type(section).model_fields[name].default:
            yield f"{section.path_of(name)} = {shown(value)} has no effect: {reason}"


def _has_validation(data: TextConfig) -> bool:
    return data.validation is not None or data.validation_share > 0
