"""The command `torchacc` itself: its help, and how it tells errors."""

import importlib.metadata

import pytest

from torchacc.cli import env_command, main
from torchacc.errors import CheckpointError


@pytest.fixture
def failing(monkeypatch):
    def fail(args):
        raise CheckpointError("this cannot be: write that")

    monkeypatch.setattr(env_command, "run", fail)


def ended(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main.main(list(arguments))
    return stopped.value.code, capsys.readouterr()


def test_the_version_is_the_packages(capsys):
    status, said = ended(capsys, "--version")
    assert status == 0
    assert said.out == f"torchacc {importlib.metadata.version('torchacc')}\n"


def test_help_tells_of_every_command(capsys):
    status, said = ended(capsys, "--help")
    assert status == 0
    assert all(name in said.out for name in main.COMMANDS)
    assert "TORCHACC_TRACEBACK" in said.out


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_has_examples_that_it_understands(name, capsys):
    status, said = ended(capsys, name, "--help")
    examples = main.command_module(name).EXAMPLES
    assert status == 0
    assert examples
    assert all(f"  {example}\n" in said.out for example in examples)
    parser = main.argparse.ArgumentParser()
    main.command_module(name).add_options(parser)
    for example in examples:
        assert parser.parse_args(example.removeprefix(f"torchacc {name}").split())


def test_a_wrong_name_is_told_the_nearest(capsys):
    status, said = ended(capsys, "plna")
    assert status == 2
    assert "there is no command 'plna'; did you mean 'plan'?" in said.err


def test_a_wrong_option_is_told_the_nearest(capsys):
    wrong = {
        "--modle-config=a": "no option '--modle-config'; did you mean '--model-config'?",
        "x": "no argument 'x'; `to",
    }
    for argument, message in wrong.items():
        status, said = ended(capsys, "train", argument)
        assert status == 2
        assert f"torchacc train: error: there is {message}" in said.err


@pytest.mark.parametrize("name", main.COMMANDS)
def test_no_option_takes_nothing_for_a_value(name):
    parser = main.argparse.ArgumentParser()
    main.command_module(name).add_options(parser)
    for action in parser._actions:
        if action.nargs not in (0, main.argparse.REMAINDER) and action.choices is None:
            with pytest.raises((ValueError, main.argparse.ArgumentTypeError)):
                action.type("")


@pytest.mark.usefixtures("failing")
def test_an_error_is_a_line(capsys, monkeypatch):
    for value in ("", "0"):
        monkeypatch.setenv("TORCHACC_TRACEBACK", value)
        assert main.main(["env"]) == 2
        assert capsys.readouterr().err == "error: this cannot be: write that\n"


@pytest.mark.usefixtures("failing")
def test_an_error_has_its_traceback_where_one_is_asked_for(monkeypatch):
    with pytest.raises(CheckpointError):
        main.main(["--traceback", "env"])
    monkeypatch.setenv("TORCHACC_TRACEBACK", "1")
    with pytest.raises(CheckpointError):
        main.main(["env"])
