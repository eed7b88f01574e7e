import json
import math
import sys

import pytest

from torchacc.errors import ConfigError
from torchacc.train.config import LoggingConfig, WandbConfig
from torchacc.train.metric_sinks import MetricsFile, TensorBoardFiles, check_packages, read_metrics


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, resumed_at=0)
    file.write([{"step": step, "loss": 1 / step} for step in (1, 2, 3)])
    file.close()
    return path


def test_a_resumed_run_cuts_what_came_after_its_checkpoint(path):
    file = MetricsFile(path, resumed_at=2)
    assert [row["step"] for row in file.kept] == [1, 2]
    file.write([{"step": 3, "loss": 0.25}])
    assert file.read() == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.25}]
    file.close()


def test_a_run_that_starts_anew_leaves_nothing_of_the_one_before(path):
    MetricsFile(path, resumed_at=0).close()
    assert path.read_text() == ""


def test_a_line_that_a_crash_cut_off_is_left_out(path):
    whole = path.read_bytes()
    for end in range(whole.rindex(b"\n", 0, -1) + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert [row["step"] for row in read_metrics(path)] == [1, 2]
    MetricsFile(path, resumed_at=5).close()
    assert [row["step"] for row in lines(path)] == [1, 2]


def test_what_is_not_finite_is_null_so_that_any_reader_takes_the_file(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", resumed_at=0)
    file.write([{"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.1}])
    file.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_no_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"step": "x"}', "[" * 100_000, '{"step": ' + "9" * 5000 + "}"])
def test_a_line_that_no_run_has_written_is_refused(line, path):
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: .* is nothing that a run has measured"):
        read_metrics(path)


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
        tracker = TensorBoardFiles(tmp_path / "tensorboard", resumed_at=resumed_at)
        for step, loss in enumerate(losses, start=resumed_at + 1):
            tracker.write([{"step": step, "loss": loss}, {"step": step, "eval_loss": loss / 2, "event": "text"}])
        tracker.close(failed=False)
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["train/loss", "eval/loss"]
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(1, 5.0), (2, 2.0)]
    assert [(event.step, event.value) for event in found.Scalars("eval/loss")] == [(1, 2.5), (2, 1.0)]
