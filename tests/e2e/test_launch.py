"""Jobs that `torchacc launch` starts: their ends, and what is left of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("launched_script.py"))
SECONDS = 120


def start(*arguments: object) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "torchacc", "launch", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(arguments[-1])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=SECONDS)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def pids_in(folder: Path, count: int) -> list[int]:
    """Wait until so many ranks run, and return their process ids."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found = [path.read_text() for path in folder.glob("pid-*")]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    raise AssertionError(f"not all ranks have started: {found}")


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_job_runs_and_shows_rank_0(tmp_path):
    done = launch("-n", 3, SCRIPT, "end", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 of 3\n"
    assert done.stderr == ""
    assert len(pids_in(tmp_path, 3)) == 3


@pytest.mark.parametrize(
    ("told", "status", "words"),
    [
        ("raise", 1, "ValueError: rank one has had enough\n"),
        ("fault", 139, "Fatal Python error: Segmentation fault"),
        ("exit", 7, "failed with exit status 7"),
        ("kill", 137, "was killed (SIGKILL)"),
    ],
)
def test_one_rank_ends_all_and_is_named(tmp_path, told, status, words):
    done = launch("-n", 2, SCRIPT, told, tmp_path)
    assert done.returncode == status
    assert words in done.stderr
    assert f"torchacc launch: rank 1 on {socket.gethostname()} " in done.stderr
    wait_until_gone(pids_in(tmp_path, 2))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_every_rank_save(tmp_path, number, status):
    process = start("-n", 2, SCRIPT, "save", tmp_path)
    pids = pids_in(tmp_path, 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == status, err
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert "Traceback" not in err
    wait_until_gone(pids)


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    process = start("-n", 2, SCRIPT, "sleep", tmp_path)
    pids = pids_in(tmp_path, 2)
    process.kill()
    process.communicate(timeout=SECONDS)
    wait_until_gone(pids)


def test_a_wrong_count_is_one_line_and_status_2(tmp_path):
    done = launch("-n", 0, SCRIPT, "end", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: num_processes = 0: write a whole number of 1 or more\n"
    assert not list(tmp_path.iterdir())
