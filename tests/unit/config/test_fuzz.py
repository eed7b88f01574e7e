"""Values and files that nobody would write: each is taken, and written again the same, or refused by a ConfigError."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchacc.config import Config
from torchacc.config.sections import Section
from torchacc.config.yaml_file import parse
from torchacc.errors import ConfigError

SECONDS, MEMORY = 20.0, 512 << 20
MAX_MESSAGE = 30_000
EXAMPLES = sorted((Path(__file__).parents[3] / "examples").rglob("*.yaml"))


def options_of(section, path=()):
    for name, field in type(section).model_fields.items():
        yield (*path, name), field.annotation
        below = getattr(section, name)
        if isinstance(below, Section):
            yield from options_of(below, (*path, name))


OPTIONS = [path for path, _ in options_of(Config())]
NAMES = st.sampled_from(sorted({name for path in OPTIONS for name in path})) | st.text(max_size=5)
NAMES |= st.sampled_from(["self", "cls", "model_config", "__class__", "size ", "\0", "\ud800", "k" * 1000])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.integers()
    | st.floats()
    | st.sampled_from(
        ["xla", "FULL_SHARD", "bfloat16", "1e-3", "010", "~", "(", "a{99999999999}", "x" * 5000, 10**4000]
    )
    | st.text(max_size=8)
    | st.binary(max_size=3)
)
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(NAMES, below, max_size=4)
        | st.dictionaries(SCALARS, below, max_size=2)
        | st.sets(SCALARS, max_size=3)
        | st.tuples(below, below)
    ),
    max_leaves=8,
)
SECTIONS = st.dictionaries(st.sampled_from(list(Config.model_fields)), VALUES, max_size=4)


def check_message(error, beginning=""):
    message = str(error)
    assert message.startswith(beginning)
    assert len(message) < MAX_MESSAGE
    assert all(line.isprintable() for line in message.split("\n"))


def check_written(config, path):
    try:
        config.to_yaml(path)
    except ConfigError as error:
        check_message(error)
        return
    assert repr(Config.from_yaml(path)) == repr(config)  # numbers that are none are not equal
    assert repr(Config.from_dict(config.to_dict())) == repr(config)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "config.yaml"


@given(values=VALUES | SECTIONS)
def test_dicts(values, path, limited):
    with limited(SECONDS, MEMORY):
        try:
            config = Config.from_dict(values)
        except ConfigError as error:
            check_message(error)
            return
        check_written(config, path)


@given(option=st.sampled_from(OPTIONS), name=st.none() | NAMES, value=VALUES)
def test_assignments(option, name, value, path, limited):
    config = section = Config()
    for above in option[:-1]:
        section = getattr(section, above)
    with limited(SECONDS, MEMORY):
        try:
            setattr(section, option[-1] if name is None or name.startswith("__") else name, value)
        except ConfigError as error:
            check_message(error)
            return
        check_written(config, path)


TAGS = st.sampled_from(
    ["bool", "int", "float", "null", "timestamp", "str", "seq", "map", "set", "omap", "binary", "merge"]
)
WORDS = st.sampled_from(
    [
        "1",
        "-1",
        "1e9999",
        "0x",
        "0b12",
        "0o7",
        "1:99",
        "2024-02-30",
        "2024-01-01T25:00:00",
        "yes",
        "~",
        ".nan",
        "=",
        "<<",
    ]
    + [
        "true",
        "'",
        '"',
        '"\\u',
        '"\\x0"',
        '"\\UFFFFFFFF"',
        "|",
        ">9",
        "*a",
        "&a",
        "!",
        "!!",
        "%",
        "@",
        "?",
        "-",
        "\t",
        "#",
    ]
    + ["xla", "9" * 5000, "k" * 2000, "\ufeff", "\x85", "---", "..."]
)
ANCHORS = st.sampled_from("abc")


def nested(below):
    lists = st.lists(below, max_size=5).map(lambda items: f"[{', '.join(items)}]")
    options = st.lists(st.tuples(NAMES.map(repr) | WORDS | st.just("<<"), below), max_size=5)
    mappings = options.map(lambda items: "{" + ", ".join(f"{name}: {value}" for name, value in items) + "}")
    anchored = st.tuples(ANCHORS, below).map(lambda item: f"&{item[0]} {item[1]}")
    tagged = st.tuples(TAGS, below).map(lambda item: f"!!{item[0]} {item[1]}")
    return lists | mappings | anchored | tagged


FLOWS = st.recursive(
    WORDS | ANCHORS.map(lambda name: f"*{name}") | st.text(string.printable, max_size=6), nested, max_leaves=15
)
DOCUMENTS = st.lists(
    st.tuples(st.sampled_from(["", "  ", "    ", "- ", "? "]), NAMES | WORDS, FLOWS).map(
        lambda x: f"{x[0]}{x[1]}: {x[2]}"
    ),
    max_size=8,
).map("\n".join)


def check_text(data, path):
    path.write_bytes(data)
    try:
        config = Config.from_yaml(path)
    except ConfigError as error:
        check_message(error, beginning=str(path))
        return
    check_written(config, path)


@given(text=DOCUMENTS | FLOWS)
def test_documents(text, path, limited):
    with limited(SECONDS, MEMORY):
        check_text(text.encode("utf-8", "surrogatepass"), path)


CHANGES = st.tuples(
    st.integers(0, 2**16),
    st.integers(0, 8),
    st.binary(max_size=4) | st.sampled_from(b"\t \n:-{}[]&*!|>'\"%@`?,#<\0").map(lambda byte: bytes([byte])),
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
@given(changes=st.lists(CHANGES, min_size=1, max_size=5))
def test_changed_examples(example, changes, path, limited):
    data = example.read_bytes()[:3000]  # what follows is of the same kind, and reading it takes long
    for at, removed, put in changes:
        at %= len(data)
        data = data[:at] + put + data[at + removed :]
    with limited(SECONDS, MEMORY):
        try:
            parse(data.decode("utf-8"), "FILE")
        except UnicodeDecodeError:
            check_text(data, path)
        except ConfigError as error:
            check_message(error)
