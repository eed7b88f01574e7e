"""Options of the launcher that stand behind the script."""

import argparse

import pytest

from torchacc.cli import launch_command


@pytest.mark.parametrize("given", [["-n", "2"], ["--nproc=2"]])
@pytest.mark.parametrize("first", [[], ["-n", "2"]])
def test_number_of_processes_behind_the_script_is_warned_of(first, given, monkeypatch, caplog):
    monkeypatch.setattr(launch_command, "launch", lambda command, options: 0)
    parser = argparse.ArgumentParser()
    launch_command.add_options(parser)
    assert launch_command.run(parser.parse_args([*first, "train.py", *given])) == 0
    said = f"{given[0]} is handed on to train.py" in caplog.text
    assert said == (not first)
