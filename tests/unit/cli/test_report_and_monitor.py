"""`torchacc report` and `torchacc monitor`, on what runs have written."""

import contextlib
import json
import os
import pty

import pytest

from tests import forkrun
from torchacc.cli import main, monitor_command
from torchacc.train.run_reading import read_run

ROWS = [{"step": step, "loss": 5.0 / step, "lr": 1e-3, "grad_norm": 1.0} for step in range(1, 51)]
ROWS[-1] |= {"tokens_per_sec": 1234.0, "secs_per_step": 0.5, "secs": 25.0, "process_memory_bytes": 2**30}
END = {"step": 50, "event": "finished", "secs": 25.0}


def write(folder, rows, **options):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"stage": folder.name, "identity": options}))
    return folder


@pytest.fixture
def folders(tmp_path):
    running = write(tmp_path / "b" / "one", ROWS, **{"training.max_steps": 100, "optimizer.lr": 0.5})
    return write(tmp_path / "a" / "one", [*ROWS, END], **{"training.max_steps": 50, "optimizer.lr": 0.5}), running


def test_a_page_compares_runs_beside_a_plan(folders, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"devices": 4, "strategies": {"FULL_SHARD": {"total": 2**29}}}))
    page = tmp_path / "page.html"
    assert main.main(["report", *map(str, folders), "--plan", str(plan), "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    said = page.read_text()
    assert all(text in said for text in ("a/one", "b/one", "no end yet", "finished", "training.max_steps"))
    assert "optimizer.lr" not in said


def test_what_is_no_plan_or_no_run_is_refused(folders, tmp_path, capsys):
    assert main.main(["report", str(folders[0]), "--plan", str(folders[0] / "run.json")]) == 2
    assert "is not what `torchacc plan --json` prints" in capsys.readouterr().err
    for command in ("report", "monitor"):
        assert main.main([command, str(tmp_path)]) == 2
        assert "name one of those below it: a/one, b/one" in capsys.readouterr().err


def test_a_page_is_not_written_over_a_runs_own(folders, monkeypatch, capsys):
    monkeypatch.chdir(folders[0])
    assert main.main(["report", "."]) == 2
    assert "whose report.html is the run's own" in capsys.readouterr().err
    assert not (folders[0] / "report.html").exists()


def test_beside_a_terminal_a_run_is_shown_once(folders, capsys):
    assert main.main(["monitor", str(folders[1])]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "no end yet, last wrote" in said
    assert "step 50/100  [" in said
    assert "50%  about 0:00:25 left" in said
    assert "tokens/s            1,234" in said
    assert "process memory   1.00 GiB" in said


def written_to(terminal):
    """Return all that was written to a terminal, whose other side is closed."""
    said = b""
    with contextlib.suppress(OSError):  # which is how it says that there is no more
        while more := os.read(terminal, 1 << 16):
            said += more
    os.close(terminal)
    return said.decode()


def test_on_a_terminal_a_run_is_followed_to_its_end(folders, monkeypatch):
    running = folders[1]

    def end(secs):
        with (running / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(END) + "\n")

    monkeypatch.setattr(monitor_command.time, "sleep", end)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(monitor_command.sys, "stdout", terminal)
        assert main.main(["monitor", str(running), "--every", "0.5"]) == 0
    said = written_to(ours)
    assert said.count("\x1b[H\x1b[J") == 2
    assert said.index("no end yet") < said.index("finished")


def test_a_run_that_failed_is_followed_while_it_may_be_started_again(folders, monkeypatch):
    file = folders[1] / "metrics.jsonl"

    def write_event(event):
        with file.open("a") as rows:
            rows.write(json.dumps({**END, "event": event}) + "\n")

    slept = []

    def sleep(secs):
        slept.append(secs)
        write_event("finished" if len(slept) == 2 else "failed: again")

    write_event("failed: out of memory")
    monkeypatch.setattr(monitor_command.time, "sleep", sleep)
    monkeypatch.setattr(monitor_command.sys.stdout, "isatty", lambda: True)
    assert main.main(["monitor", str(folders[1])]) == 0
    assert len(slept) == 2
    write_event("failed: for good")
    os.utime(file, (0, 0))
    assert main.main(["monitor", str(folders[1])]) == 0
    assert len(slept) == 2


def test_following_a_run_loads_nothing_that_draws():
    code = "import sys, torchacc.cli.monitor_command; print(sorted({'matplotlib', 'torch_xla'} & sys.modules.keys()))"
    assert forkrun.run("-c", code).stdout == "[]\n"


def test_no_line_is_longer_than_the_terminal(folders):
    for width in (20, 60, 200):
        text = monitor_command.describe(folders[1], read_run(folders[1]), width=width)
        assert max(map(len, text.splitlines())) <= width


def test_a_sparkline_shows_means():
    assert monitor_command.sparkline([1, 1, 1], 8) == "▁▁▁"
    assert monitor_command.sparkline([0, 0, 1, 1, 7, 7], 3) == "▁▂█"
    assert monitor_command.sparkline([0, 7], 8) == "▁█"


def test_how_often_is_a_number(capsys):
    with pytest.raises(SystemExit):
        main.main(["monitor", "x", "--every", "often"])
    assert "write seconds from 0.1 to 3600" in capsys.readouterr().err
