"""`torchacc quickstart`; tests/e2e/test_installed.py runs what it writes."""

import ast
import re

import pytest

from torchacc.cli import main
from torchacc.train.file import TrainFile


def test_it_writes_a_script_and_a_training_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["quickstart", "new/run"]) == 0
    folder = tmp_path / "new" / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "train.py"]
    ast.parse((folder / "train.py").read_text())
    assert list(TrainFile.read(folder / "config.yaml").stages) == ["quickstart"]
    commands = [re.split(" +#", line.strip())[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert commands[:2] == ["cd new/run", "python train.py"]
    assert all(command.split()[1] in main.COMMANDS for command in commands if command.startswith("torchacc"))


def test_in_the_folder_itself_there_is_none_to_enter(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["quickstart"]) == 0
    assert "cd " not in capsys.readouterr().out


@pytest.mark.parametrize("held", ["train.py", ".hidden", "other.txt"])
def test_it_writes_over_and_beside_nothing(tmp_path, held, capsys):
    (tmp_path / held).write_text("mine")
    assert main.main(["quickstart", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [held]
    assert f"holds {held}" in capsys.readouterr().err


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main.main(["quickstart", str(tmp_path / "file")]) == 2
    assert main.main(["quickstart", str(tmp_path / "file" / "below")]) == 2
    assert "is a file" in capsys.readouterr().err
