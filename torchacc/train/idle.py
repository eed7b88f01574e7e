"""Options of a stage that mean nothing beside others that it has."""

from collections.abc import Iterator
from pathlib import Path

from torchacc.errors import shown
from torchacc.train.config import SchedulerConfig, TextConfig, TrainingConfig


def idle_options(
    data: TextConfig, scheduler: SchedulerConfig, training: TrainingConfig, *, weights: Path | str | None
) -> Iterator[str]:
    """Yield a line for each option that a file gives and nothing looks at: which it is, and why.

    Args:
        data: The stage's text.
        scheduler: Its learning rate.
        training: Its loop.
        weights: What it starts from, whose tokenizer the text has where the folder holds one; None for new weights.
    """
    has_tokenizer = weights is not None and (Path(weights).expanduser() / "tokenizer_config.json").is_file()
    has_evaluation = data.validation is not None or data.validation_share > 0
    idle = [
        (data, "text_column", data.dataset == "stdlib", "stdlib has no columns"),
        (data, "vocab_size", data.tokenizer is not None, "data.tokenizer has its own"),
        (data, "vocab_size", data.tokenizer is None and has_tokenizer, f"the tokenizer is that of {weights}"),
        (data, "validation_share", data.validation is not None, "data.validation says what to evaluate on"),
        (data, "num_proc", data.streaming, "text that is streamed is tokenized as it is read"),
        (data, "cache_dir", data.streaming, "nothing is kept of text that is streamed"),
        (scheduler, "min_lr_ratio", scheduler.name == "constant", "the learning rate stays"),
        (training, "eval_every_steps", not has_evaluation, "there is nothing to evaluate on"),
        (training, "eval_steps", not has_evaluation, "there is nothing to evaluate on"),
    ]
    for section, name, is_idle, reason in idle:
        value = getattr(section, name)
        if is_idle and name in section.model_fields_set and value != type(section).model_fields[name].default:
            yield f"{section.path_of(name)} = {shown(value)} has no effect: {reason}"
