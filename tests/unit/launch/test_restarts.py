import pytest

from torchacc.launch import LaunchOptions, restarts
from torchacc.launch.restarts import Ended, Restarts


def fault(step: int) -> Ended:
    return Ended(9, step, is_fault=True)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    found = {"number": None}
    monkeypatch.setattr(restarts, "count_gpus", lambda: found["number"])
    return found


def sizes(options: LaunchOptions, *steps: int) -> list[int | None]:
    chosen = Restarts(options)
    return [chosen.next_size(fault(step)) for step in steps]


def test_as_many_restarts_as_asked_for(capsys):
    assert sizes(LaunchOptions(num_processes=4, max_restarts=2), 5, 9, 20) == [4, 4, None]
    said = capsys.readouterr().err
    assert "restart 1 of 2, after step 5" in said
    assert "restart 2 of 2, after step 9" in said
    assert "not restarted: all 2 restarts are used (--max-restarts)" in said


def test_none_unless_asked_for_and_for_no_fault(capsys):
    assert sizes(LaunchOptions(), 5) == [None]
    assert Restarts(LaunchOptions(max_restarts=3)).next_size(Ended(2)) is None
    assert capsys.readouterr().err == ""


def test_a_bug_is_not_tried_for_ever(capsys):
    options = LaunchOptions(num_processes=2, max_restarts=9)
    assert sizes(options, 5, 5, 5) == [2, 2, None]
    assert "2 restarts made no progress beyond step 5" in capsys.readouterr().err
    assert sizes(options, 5, 4, 6, 6, 6) == [2, 2, 2, 2, None]


def test_half_where_it_does_not_get_on(capsys):
    options = LaunchOptions(num_processes=4, max_restarts=9, min_processes=2)
    assert sizes(options, 5, 5, 8, 8, 8) == [4, 2, 2, 2, None]
    assert "restart 2 of 9 with 2 processes in place of 4, after step 5" in capsys.readouterr().err


def test_as_many_as_there_are_gpus(gpus, capsys):
    chosen = Restarts(LaunchOptions(num_processes=4, max_restarts=9, min_processes=2))
    gpus["number"] = 3
    assert chosen.next_size(fault(5)) == 3
    gpus["number"] = 1
    assert chosen.next_size(fault(8)) is None
    assert "1 GPUs are left, and 2 are needed" in capsys.readouterr().err
    assert Restarts(LaunchOptions(num_processes=4, max_restarts=9)).next_size(fault(5)) is None
