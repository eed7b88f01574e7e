import os
import re

import pytest

from torchacc.config.text_file import read_json, read_text
from torchacc.errors import ConfigError


def refused(message):
    return pytest.raises(ConfigError, match=re.escape(message))


def test_a_byte_order_mark_is_left_out(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\xef\xbb\xbfx: \xc3\xa9")
    assert read_text(path) == "x: é"


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, message in {
        tmp_path / "absent": "there is no such file",
        tmp_path: "it is a folder",
        tmp_path / "pipe": "it is a pipe or a device",
        "/dev/zero": "it is a pipe or a device",
        "/dev/null": "it is a pipe or a device",
        tmp_path / "pipe" / "x": "it cannot be read: Not a directory",
        "x" * 5000: "it cannot be read: File name too long",
        "a\0b": "no path: embedded null byte",
    }.items():
        shown = str(path).replace("\0", "\\x00")
        with refused(f"{shown}: {message}"):
            read_text(path)


def test_a_large_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("12345")
    assert read_text(path, 5) == "12345"
    with refused("has more than 4 bytes"):
        read_text(path, 4)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with refused("has more than 1,048,576 bytes"):
        read_text(path)


@pytest.mark.parametrize("text", ["x: é", "x: 1"])
def test_another_encoding_is_refused(text, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a: 1\n" + text.encode("utf-16"))
    with refused(f"{path}:2: not text in UTF-8"):
        read_text(path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5000, '{"a": 1} x'])
def test_what_is_no_json_is_refused(text, tmp_path):
    path = tmp_path / "file"
    path.write_text(text)
    with refused(f"{path}: not JSON: "):
        read_json(path)
