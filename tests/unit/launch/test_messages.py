import pytest

from torchacc.launch import messages
from torchacc.launch.options import LaunchOptions
from torchacc.launch.progress import Phase, Progress

CHAINED = """step 1
Traceback (most recent call last):
  File "old.py", line 1
RuntimeError: of another time
step 2
Traceback (most recent call last):
  File "train.py", line 4
ZeroDivisionError: division by zero

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 6
ValueError: what it led to
"""


def test_last_words_are_the_last_traceback_and_what_it_is_chained_to():
    assert messages.last_words(CHAINED) == CHAINED[CHAINED.index("Traceback", 20) :].rstrip()


def test_last_words_are_found_behind_the_ranks_that_pytorch_writes():
    of_rank = "step 1\n" + "".join(f"[rank3]: {line}\n" for line in CHAINED.splitlines()[1:])
    expected = [f"[rank3]: {line}" for line in CHAINED[CHAINED.index("Traceback", 20) :].splitlines()]
    assert messages.last_words(of_rank).splitlines() == expected


def test_last_words_without_a_traceback_are_the_last_lines():
    assert messages.last_words("\n".join(map(str, range(1000)))).splitlines() == [str(n) for n in range(940, 1000)]


def test_a_traceback_of_long_ago_is_none_of_the_last_words():
    words = messages.last_words(CHAINED + "a line\n" * 300)
    assert words.splitlines() == ["a line"] * 60


def test_ranks_that_are_apart_are_told_with_what_to_write(capsys):
    places = {
        rank: Progress(step=2, own_steps=2, phase=phase, since=0.0)
        for rank, phase in enumerate((Phase.FORWARD, Phase.BACKWARD, *[Phase.BACKWARD] * 9))
    }
    messages.diverged(places, "no rank has gone on")
    said = capsys.readouterr().err
    assert "no rank has gone on: rank 0 in the forward pass of step 3 for" in said
    assert "rank 1 between the forward pass and the optimizer's step of step 3 for" in said
    assert "rank 7 " in said
    assert "rank 8 " not in said
    assert "not under `if rank == 0:`" in said


def test_a_killed_process_is_named_as_such():
    killed = "was killed (SIGKILL): by a kill -9, or its container; with --max-restarts N all start again"
    assert messages.how_it_ended(-9) == killed
    assert messages.how_it_ended(-9, is_out_of_memory=True) == "was killed (SIGKILL): memory ran out"
    assert messages.how_it_ended(-11) == "was ended by SIGSEGV"
    assert messages.how_it_ended(3) == "failed with exit status 3"


def test_a_port_that_another_launcher_took_meanwhile_is_named_as_such(capsys):
    messages.not_started("The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE")
    assert "another launcher of this machine has the port: write another master_port" in capsys.readouterr().err


def test_the_system_is_asked_for_what_it_killed(tmp_path, monkeypatch):
    assert messages.count_oom_kills() >= 0
    monkeypatch.setattr(messages, "_VMSTAT", tmp_path / "vmstat")
    assert messages.count_oom_kills() == 0
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    assert messages.count_oom_kills() == 3


@pytest.mark.parametrize(("address", "is_here"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False)])
def test_a_node_0_elsewhere_is_noticed(address, is_here, capsys):
    messages.waiting(LaunchOptions(num_nodes=2, node_rank=0, master_addr=address, master_port=29500), 5.2)
    said = capsys.readouterr().err
    assert f"node 0 waits until the launchers of all 2 nodes are at {address}:29500" in said
    assert "for 5 s by now" in said
    assert (f"{address} is not an address of this machine, where node 0 has to be" in said) != is_here
