import json
import math

import pytest

from torchacc.errors import ConfigError
from torchacc.train.history import History, read_history


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "metrics.jsonl"
    history = History(path, resumed_at=0)
    history.write([{"step": step, "loss": 1 / step} for step in (1, 2, 3)])
    history.close()
    return path


def test_a_resumed_run_cuts_what_came_after_its_checkpoint(path):
    history = History(path, resumed_at=2)
    assert [row["step"] for row in history.kept] == [1, 2]
    history.write([{"step": 3, "loss": 0.25}])
    assert history.read() == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.25}]
    history.close()


def test_a_run_that_starts_anew_leaves_nothing_of_the_one_before(path):
    History(path, resumed_at=0).close()
    assert path.read_text() == ""


def test_a_line_that_a_crash_cut_off_is_left_out(path):
    whole = path.read_bytes()
    for end in range(whole.rindex(b"\n", 0, -1) + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert [row["step"] for row in read_history(path)] == [1, 2]
    History(path, resumed_at=5).close()
    assert [row["step"] for row in lines(path)] == [1, 2]


def test_what_is_not_finite_is_null_so_that_any_reader_takes_the_file(tmp_path):
    history = History(tmp_path / "metrics.jsonl", resumed_at=0)
    history.write([{"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.1}])
    history.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_no_file_has_no_rows(tmp_path):
    assert read_history(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"step": "x"}', "[" * 100_000, '{"step": ' + "9" * 5000 + "}"])
def test_a_line_that_no_run_has_written_is_refused(line, path):
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: .* is nothing that a run has measured"):
        read_history(path)
