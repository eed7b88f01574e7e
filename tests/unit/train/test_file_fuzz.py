"""The shipped training file with values, names and bytes that nobody would write: read, or refused by a ConfigError."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from torchacc.errors import ConfigError
from torchacc.train.file import TrainFile

EXAMPLE = (Path(__file__).parents[3] / "examples" / "config.yaml").read_bytes()
SECONDS, MEMORY = 60.0, 1 << 30


def options_of(values, path=()):
    for name, value in values.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from options_of(value, (*path, name))


VALUES = yaml.safe_load(EXAMPLE)
OPTIONS = list(options_of(VALUES))
ODD = st.sampled_from(
    [None, True, -1, 0, 2**63, 10**9, 1e308, float("nan"), "", "x", "x" * 4000, [], [1], {}, {"self": 1}]
)
ODD |= (
    st.text(max_size=6) | st.integers() | st.floats() | st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)
)
NAMES = st.sampled_from(["self", "model_config", "model_config_x", "params", "fused", "closure", "__class__"])


def read(data, path):
    path.write_bytes(data)
    try:
        file = TrainFile.read(path)
        for each in (file.stage, file.model, file.preset):
            each("stage1")
    except ConfigError as error:
        check_message(str(error), path)


def check_message(message, path):
    assert message.startswith(str(path))
    assert len(message) < 30_000
    assert all(line.isprintable() for line in message.split("\n"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "config.yaml"


@settings(max_examples=max(40, settings().max_examples // 10))
@given(option=st.sampled_from(OPTIONS), name=st.none() | NAMES, value=ODD)
def test_another_value(option, name, value, path, limited):
    values = yaml.safe_load(EXAMPLE)
    section = values
    for above in option[:-1]:
        section = section[above]
    section[option[-1] if name is None else name] = value
    with limited(SECONDS, MEMORY):
        read(yaml.safe_dump(values).encode(), path)


@settings(max_examples=max(20, settings().max_examples // 10))
@given(at=st.integers(0, len(EXAMPLE) - 1), removed=st.integers(0, 30), put=st.binary(max_size=3) | st.just(b" "))
def test_other_bytes(at, removed, put, path, limited):
    with limited(SECONDS, MEMORY):
        read(EXAMPLE[:at] + put + EXAMPLE[at + removed :], path)
