"""What a document may not hold, and that it is told quickly, with line and column."""

import re
import time

import pytest

from torchacc.config.yaml_file import parse
from torchacc.errors import ConfigError

LIMIT = 10.0
"""Seconds for the worst of what is allowed to come in."""


def refusal(text):
    with pytest.raises(ConfigError) as raised:
        parse(text, "FILE")
    return str(raised.value)


def test_plain_values():
    text = "a: 1\nb: 1e-3\nc: .5\nd: yes\ne: ~\nf:\ng: 'x'\nh: [1, {i: 2}]\nj: 1_000\nk: -.inf\nl: 0x1F\nm: 1:x\n"
    text += "n: !!float 2\n"
    assert parse(text, "FILE")[0] == {
        "a": 1, "b": 1e-3, "c": 0.5, "d": True, "e": None, "f": None, "g": "x", "h": [1, {"i": 2}], "j": 1000,
        "k": float("-inf"), "l": 31, "m": "1:x", "n": 2.0,
    }  # fmt: skip
    assert parse("", "FILE")[0] is None


def test_merged_options_yield_to_an_options_own_and_to_those_before():
    text = "a: &a {x: 1, y: 1}\nb: &b\n  y: 2\n  z: 2\nc: {z: 3, <<: [*a, *b]}\nd:\n  <<: *b\n"
    values, lines = parse(text, "FILE")
    assert values["c"] == {"x": 1, "y": 1, "z": 3}
    assert values["d"] == {"y": 2, "z": 2}
    assert (lines["c"], lines["c.x"], lines["c.z"], lines["d.y"]) == (5, 1, 5, 3)


REFUSED = {
    "a: !!bool x": "FILE:1: a: 'x' is not a valid bool, in column 4",
    "a: !!int x": "FILE:1: a: 'x' is not a valid int, in column 4",
    "a: !!int ''": "FILE:1: a: '' is not a valid int, in column 4",
    "a:\n  b: !!float x": "FILE:2: a.b: 'x' is not a valid float, in column 6",
    "a: !!null x": "FILE:1: a: 'x', with the tag '!!null', is not an option's value, in column 4",
    "a: !!timestamp x": "FILE:1: a: 'x' is a date to YAML; put it in quotes, in column 4",
    "a: 2024-13-01": "FILE:1: a: '2024-13-01' is a date to YAML; put it in quotes, in column 4",
    "a: 2024-11-01": "FILE:1: a: '2024-11-01' is a date to YAML; put it in quotes, in column 4",
    "a: =": "FILE:1: a: '=' is a default to YAML; put it in quotes, in column 4",
    f"a: {'9' * 5000}": "FILE:1: a: a number of 5,000 digits is not an option's value, in column 4",
    f"a: 0x{'9' * 5000}": "FILE:1: a: a number of 5,002 digits is not an option's value, in column 4",
    "a: 010": "FILE:1: a: 010 is a number in base 8 or 60 to YAML; write it in base 10, or put it in quotes",
    "a: 1:30": "FILE:1: a: 1:30 is a number in base 8 or 60 to YAML",
    "a: 1:30.5": "FILE:1: a: 1:30.5 is a number in base 8 or 60 to YAML",
    f"a: {'x' * 4097}": "… holds more than 4,096 characters, in column 4",
    'a: "\\0"': r"FILE:1: a: '\x00' holds a character that no text has, in column 4",
    'a: "\\ud800"': r"FILE:1: a: '\ud800' holds a character that no text has, in column 4",
    'a: "\\UFFFFFFFF"': "FILE:1: not YAML: Python int too large",
    "a: \x1b": r"FILE:1: not YAML: the character '\x1b' cannot be printed, in column 4",
    f"%YAML 1.{'9' * 5000}\n--- 1": "FILE:1: not YAML: Exceeds the limit",
    "a: !!python/object:os.system x": "with the tag '!!python/object:os.system', is not an option's value",
    "a: !!binary x": "with the tag '!!binary', is not an option's value",
    "a: !!set {x}": "FILE:1: a: the tag '!!set' makes no option's value, in column 4",
    "a: !!str [x]": "FILE:1: a: the tag '!!str' makes no option's value, in column 4",
    "a:\n  1: x": "FILE:2: a.1: the name of an option is a string, not 1; put it in quotes, in column 3",
    "yes: x": "FILE:1: True: the name of an option is a string, not True; put it in quotes, in column 1",
    "? [a]\n: x": "FILE:1: the name of an option is a string, and no list or mapping, in column 3",
    '"a\\nb": x': r"FILE:1: a\nb: the name of an option can be printed, and 'a\nb' cannot, in column 1",
    f"? {'k' * 501}\n: x": "the name of an option has 500 characters at most, not 501, in column 3",
    "a: 1\nb: {c: 1, c: 2}": "FILE:2: not YAML: b.c is given twice, in column 11",
    "a: [{c: 1, c: 2}]": "FILE:1: not YAML: a[].c is given twice, in column 12",
    "<<: {a: 1}\n<<: {b: 1}": "FILE:2: not YAML: << is given twice",
    "<<: [1]": "FILE:1: << takes options by name, or a list of such, in column 6",
    "a: *b": "FILE:1: not YAML: found undefined alias 'b', in column 4",
    "a: &a [*a]": "FILE:1: not YAML: *a lies in itself, in column 8",
    "--- 1\n--- 2": "FILE:2: not YAML: but found another document, in column 1",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=lambda text: ascii(text[:40]))
def test_what_is_refused(text, message):
    assert message in refusal(text)


def repeated(first, each, count, opening, closing):
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {opening}{', '.join(each(j, i - 1) for j in range(9))}{closing}" for i in range(1, count)]
    return "\n".join(lines)


LARGE = {
    "mappings": repeated("{x: 1}", lambda j, i: f"k{j}: *a{i}", 20, "{", "}"),
    "sequences": repeated("[x]", lambda j, i: f"*a{i}", 20, "[", "]"),
    "merges": repeated("{x: 1}", lambda j, i: f"*a{i}", 20, "{<<: [", "]}"),
    "a chain": "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 150))]),
    "a chain of merges": "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: *a{i - 1}}}" for i in range(1, 100))]),
    "one text": "\n".join([f"a: &a {'x' * 4000}", *(f"b{i}: *a" for i in range(1000))]),
    "many values": "\n".join(f"a{i}: 1" for i in range(25_000)),
    "brackets": "[" * 10**5,
    "dashes": "- " * 500_000,
    "questions": "? " * 500_000,
    "deep names": "\n".join([*(f"{' ' * i}{'k' * 480}:" for i in range(60)), *([" " * 60 + "x:"] * 3000)]),
}  # fmt: skip


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_what_is_too_large_is_refused_in_time(text):
    began = time.process_time()
    message = refusal(text)
    assert time.process_time() - began < LIMIT
    assert re.match(r"FILE:\d+: ", message)
    assert len(message) < 1500
