import json
import logging
import math
import sys

import pytest
import torch

from torchacc.config import Config
from torchacc.engines import registry
from torchacc.engines.native.native_engine import NativeEngine
from torchacc.env import Job
from torchacc.logging import get_logger, make_console
from torchacc.train.metrics import RunLog


class Fetches(NativeEngine):
    """Counts how often the device is waited for."""

    fetched = ()

    def read_scalars(self, scalars):
        self.fetched = (*self.fetched, len(scalars))
        return super().read_scalars(scalars)

    def device_name(self):
        return "NVIDIA H100 80GB HBM3"


@pytest.fixture
def engine(monkeypatch):
    made = registry.make_engine(Config(backend="native"), Job())
    engine = Fetches(config=made.config, mesh=made.mesh, job=made.job)
    monkeypatch.setattr(registry._active, "engine", engine)
    return engine


@pytest.fixture
def folder(tmp_path, engine, caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="torchacc")
    monkeypatch.setattr(logging.getLogger("torchacc"), "propagate", True)
    return tmp_path


def make_log(folder, **options):
    return RunLog(
        folder, {"stage": "demo"}, **({"total_steps": 20, "tokens_per_step": 8, "log_every_steps": 5} | options)
    )


def train(log, steps, loss=lambda step: 1 / step, **options):
    for step in steps:
        log.step(step, loss=torch.tensor(loss(step)), grad_norm=torch.tensor(2.0), lr=0.1, **options)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_written_and_the_device_is_waited_for_once_an_interval(folder, engine):
    log = make_log(folder)
    train(log, range(1, 21))
    assert engine.fetched == (4, 6, 10, 10, 10)  # the warm-up's two steps, then each interval; a loss and a norm each
    log.close("finished")
    *steps, end = rows(folder)
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert [row["loss"] for row in steps] == [torch.tensor(1 / step).item() for step in range(1, 21)]
    assert {(row["grad_norm"], row["lr"]) for row in steps} == {(2.0, 0.1)}
    assert [row["tokens"] for row in steps] == list(range(8, 168, 8))
    assert end["event"] == "finished"
    assert "demo" in (folder / "report.html").read_text()


def test_rates_are_those_of_intervals_after_the_warm_up(folder, caplog):
    log = make_log(folder, flops_per_token=1e12, log_every_steps=2)
    train(log, range(1, 7), data_wait_secs=1e9)
    measured = [row for row in rows(folder) if "tokens_per_sec" in row]
    assert [row["step"] for row in measured] == [4, 6]
    for row in measured:
        assert row["tokens_per_sec"] * row["secs_per_step"] == pytest.approx(8)
        assert row["mfu"] == pytest.approx(row["tokens_per_sec"] / 989)
        assert row["data_wait"] == 1.0
    lines = [record.getMessage() for record in caplog.records if "lr" in record.getMessage()]
    assert lines[0].startswith("step  2/20  loss 0.5000  lr 1.00e-01  grad norm 2")
    assert "tokens/s" not in lines[0]
    for text in ("tokens/s", "MFU", "data wait 100.0%"):
        assert text in lines[1]
    assert any("the first 2 steps took" in record.getMessage() for record in caplog.records)
    log.close("finished")


def test_what_is_set_aside_is_in_no_rate(folder, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("torchacc.train.metrics.time.perf_counter", lambda: now[0])
    log = make_log(folder)
    for step in range(1, 11):
        now[0] += 2.0
        train(log, [step])
        if step == 7:
            with log.aside():
                now[0] += 100.0
            assert rows(folder)[-1]["step"] == 7  # a checkpoint saved here has what came before
    found = [row for row in rows(folder) if "tokens_per_sec" in row]
    assert [row["tokens_per_sec"] for row in found] == [4.0, 4.0]
    assert found[-1]["secs"] == 120.0
    log.close("finished")


def test_a_resumed_run_goes_on_with_the_counts_of_the_one_before(folder):
    log = make_log(folder)
    train(log, range(1, 11))
    log.evaluated(10, 0.5)
    del log  # killed; it had a checkpoint of step 5
    log = make_log(folder, resumed_at=5)
    train(log, range(6, 21))
    log.close("finished")
    steps = [row for row in rows(folder) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert steps[-1]["tokens"] == 160
    assert not [row for row in rows(folder) if "eval_loss" in row]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_reported_once_at_its_step(folder, caplog, value):
    log = make_log(folder)
    train(log, range(1, 21), loss=lambda step: value if step >= 7 else 1.0)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [f"step 7: the loss is {value}; later ones are not reported"]
    log.close("failed: not finite")
    assert [row["step"] for row in rows(folder) if row.get("event") == warned[0]] == [7]


def test_steps_in_a_row_that_are_not_finite_are_counted_as_far_as_they_are_fetched(folder):
    log = make_log(folder, is_master=False)
    train(log, range(1, 6), loss=lambda step: math.nan if step >= 3 else 1.0)
    assert log.num_not_finite == 3
    train(log, range(6, 9), loss=lambda step: math.nan if step == 8 else 1.0)
    assert log.num_not_finite == 3
    log.flush()
    assert log.num_not_finite == 1
    log.close("finished")


def test_a_process_that_is_not_the_master_fetches_alike_and_says_nothing(folder, engine, caplog):
    log = make_log(folder, is_master=False)
    train(log, range(1, 21))
    log.event("something")
    log.evaluated(20, 1.0)
    log.close("finished")
    assert engine.fetched[:5] == (4, 6, 10, 10, 10)
    assert not caplog.records
    assert not list(folder.iterdir())


def test_a_run_that_fails_keeps_what_it_had_and_has_its_report(folder, engine, monkeypatch, caplog):
    log = make_log(folder)
    train(log, range(1, 9))

    def lost(scalars):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine, "read_scalars", lost)
    log.close("failed: the device is gone")
    log.close("a second time")
    assert "what the last 3 steps measured is lost: the device is gone" in caplog.text
    assert [row["step"] for row in rows(folder) if "loss" in row] == [1, 2, 3, 4, 5]
    assert "failed: the device is gone" in (folder / "report.html").read_text()
    assert rows(folder)[-1]["event"] == "failed: the device is gone"


def test_a_terminal_shows_a_bar_and_whole_lines_above_it(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(get_logger("torchacc"), "handlers", [make_console(0)])
    monkeypatch.setattr(get_logger("torchacc"), "propagate", False)
    log = make_log(folder)
    train(log, range(1, 11))
    shown = capsys.readouterr().err
    assert "| 10/20 [" in shown
    lines = [line.rpartition("\r")[2] for line in shown.split("\n")]
    assert [line.split("  ")[1] for line in lines if line.startswith("torchacc: step 10")] == ["loss 0.1000"]
    assert shown.count("torchacc: step ") == 2
    log.close("stopped: SIGTERM")
