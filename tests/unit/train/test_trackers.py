import sys

import pytest

from torchacc.errors import ConfigError
from torchacc.train.config import LoggingConfig, WandbConfig
from torchacc.train.trackers import check_packages, make_trackers

TENSORBOARD, WANDB = LoggingConfig(tensorboard=True), WandbConfig(use_wandb=True)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, tmp_path):
    # A folder that wandb has left here is no package.
    for name in ("tensorboard", "wandb"):
        (tmp_path / name).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in repr(finder)])
    with pytest.raises(ConfigError, match=r"logging.tensorboard = True .* `pip install 'torchacc\[tensorboard\]'`"):
        check_packages(TENSORBOARD, WandbConfig())
    with pytest.raises(ConfigError, match=r"wandb.use_wandb = True .* `pip install 'torchacc\[wandb\]'`"):
        check_packages(LoggingConfig(), WANDB)
    check_packages(LoggingConfig(), WandbConfig())


def test_tensorboard_gets_the_curves_and_loses_what_a_resumed_run_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_at, losses in ((0, [5.0, 4.0, 3.0]), (1, [2.0])):
        (tracker,) = make_trackers(tmp_path, TENSORBOARD, WandbConfig(), facts={}, resumed_at=resumed_at)
        for step, loss in enumerate(losses, start=resumed_at + 1):
            tracker.write([{"step": step, "loss": loss}, {"step": step, "eval_loss": loss / 2, "event": "text"}])
        tracker.close(failed=False)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["train/loss", "eval/loss"]
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 5.0), (2, 2.0)]
    assert [(event.step, event.value) for event in found.Scalars("eval/loss")] == [(1, 2.5), (2, 1.0)]
