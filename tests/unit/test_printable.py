"""What messages hide of names that somebody else has given."""

import logging

import pytest

from torchacc.errors import CheckpointError, ConfigError, printable
from torchacc.logging import make_console


def test_a_name_commands_no_terminal():
    name = "a\x1b[2Jb\rc\u202ed\ud800"
    assert printable(name) == r"a\x1b[2Jb\rc\u202ed\ud800"
    assert printable("two\nlines\t", "\n\t") == "two\nlines\t"
    assert printable("Grüße, 世界 🙂") == "Grüße, 世界 🙂"
    assert str(CheckpointError(f"{name} is damaged\nerror: all is well")) == (
        r"a\x1b[2Jb\rc\u202ed\ud800 is damaged\nerror: all is well"
    )
    assert str(ConfigError("first\nsecond\x07")) == "first\nsecond\\x07"
    assert isinstance(ConfigError(""), ValueError)
    record = logging.LogRecord("torchacc", logging.INFO, "", 1, "saved %s", (name,), None)
    assert make_console(0).format(record) == r"torchacc: saved a\x1b[2Jb\rc\u202ed\ud800"


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError])
def test_an_error_without_a_message_is_one(kind):
    assert str(kind()) == ""
