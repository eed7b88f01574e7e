import pytest

from torchacc.train.checks import options_without_effect
from torchacc.train.config import SchedulerConfig, TextConfig, TrainingConfig, ValidationConfig

STREAM = {"streaming": True, "tokenizer": "t"}
IDLE = {
    "data.text_column = 'body'": {"data": {"text_column": "body"}},
    "data.vocab_size = 300": {"data": {"vocab_size": 300, "tokenizer": "t"}},
    "data.validation_share = 0.5": {"data": {"validation_share": 0.5, "validation": ValidationConfig(split="test")}},
    "data.num_proc = 2": {"data": {"num_proc": 2, **STREAM}},
    "data.cache_dir = 'here'": {"data": {"cache_dir": "here", **STREAM}},
    "scheduler.min_lr_ratio = 0.5": {"scheduler": {"name": "constant", "min_lr_ratio": 0.5}},
    "training.eval_every_steps = 5": {"data": {"validation_share": 0}, "training": {"eval_every_steps": 5}},
    "training.eval_steps = 5": {"data": {"validation_share": 0}, "training": {"eval_steps": 5}},
}


def found(data=None, scheduler=None, training=None, weights=None):
    sections = TextConfig(**data or {}), SchedulerConfig(**scheduler or {}), TrainingConfig(**training or {})
    return list(options_without_effect(*sections, weights=weights))


@pytest.mark.parametrize(("option", "given"), IDLE.items(), ids=IDLE)
def test_an_option_that_nothing_looks_at_is_named(option, given):
    [line] = found(**given)
    assert line.startswith(f"{option} has no effect: ")


def test_options_that_count_are_not():
    assert found() == []
    data = {"dataset": "json", "files": "a.json", "text_column": "body", "vocab_size": 300, "validation_share": 0.5}
    assert found(data, {"min_lr_ratio": 0.5}, {"eval_steps": 5}) == []


def test_weights_bring_their_tokenizer(tmp_path):
    assert found({"vocab_size": 300}, weights=tmp_path) == found({"vocab_size": 300}, weights="a/name") == []
    (tmp_path / "tokenizer_config.json").touch()
    assert found({"vocab_size": 300}, weights=tmp_path) == [
        f"data.vocab_size = 300 has no effect: the tokenizer is that of {tmp_path}"
    ]
