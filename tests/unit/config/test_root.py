import math
import re

import pytest

from torchacc.config import Config
from torchacc.errors import ConfigError


@pytest.fixture
def config():
    return Config(
        backend="lazy",
        compute={"bf16": True},
        dataloader={"buckets": [128, 256], "pad_value_dict": {"labels": -100, "mask": -math.inf}},
        dist={"fsdp": {"size": 4, "wrap_layer_cls": {"B", "A"}}, "dp": {"size": 2}},
    )


def write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_dict_is_plain_complete_and_reads_back_equal(config):
    values = config.to_dict()
    assert values["backend"] == "xla"
    assert values["dist"]["fsdp"]["wrap_layer_cls"] == ["A", "B"]
    assert values["dist"]["fsdp"]["sharding_strategy"] == "FULL_SHARD"
    assert Config.from_dict(values) == config


def test_a_yaml_file_reads_back_equal(config, tmp_path):
    config.to_yaml(tmp_path / "config.yaml")
    assert Config.from_yaml(tmp_path / "config.yaml") == config


def test_a_frozen_config_is_written_too_and_read_back_assignable(config, tmp_path):
    config.freeze()
    config.to_yaml(tmp_path / "config.yaml")
    read = Config.from_yaml(str(tmp_path / "config.yaml"))
    assert read == config
    read.dist.fsdp.size = 2


def test_options_left_out_of_a_file_have_their_defaults(tmp_path):
    assert Config.from_yaml(write(tmp_path, "")) == Config()
    assert Config.from_yaml(write(tmp_path, "dist: {fsdp: {size: 4}}")) == Config(dist={"fsdp": {"size": 4}})


@pytest.mark.parametrize("option", ["wrap_modules", "shard_output_callable"])
def test_a_function_cannot_be_written(config, option, tmp_path):
    setattr(config.dist.fsdp, option, print)
    for write_out in (config.to_dict, lambda: config.to_yaml(tmp_path / "config.yaml")):
        with pytest.raises(ConfigError, match=rf"dist\.fsdp\.{option} = .*a function cannot be written to a file"):
            write_out()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dist:\n  fsdp:\n    sise: 4\n", ":3: dist.fsdp.sise = 4: there is no such option; did you mean 'size'?"),
        ("compute:\n  bf16: 'yes'\n", ":2: compute.bf16 = 'yes': expected True or False"),
        ("dist:\n  fsdp:\n    size: 4\n    size: 2\n", ":4: not YAML: dist.fsdp.size is given twice"),
        ("dist:\n  fsdp: [\n", ":3: not YAML: "),
        ("dist:\n  1: 2\n", ":2: dist.1: the name of an option is a string, not 1; put it in quotes"),
        ("dist:\n  fsdp: &a {sise: 4}\nmemory:\n  <<: *a\n", ":2: dist.fsdp.sise = 4: there is no such option"),
        ("memory: &a\n  gc: false\ncompute:\n  <<: *a\n", ":2: compute.gc = False: there is no such option"),
        ("compute: \0", ":1: not YAML: the character '\\x00' cannot be printed, in column 10"),
        ("compute: &a\n  gc: *a", ":2: not YAML: *a lies in itself"),
        ("compute: &a [1,\n  [*a]]", ":2: not YAML: *a lies in itself"),
        ("compute: &a\n  <<: *a", ":2: not YAML: *a lies in itself"),
        ("\n" + "{a: " * 3000 + "}" * 3000, ":2: not YAML: more than 64 values in one another"),
        ("just words", ":1: expected options such as `backend: xla`, found 'just words'"),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_line(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(f"{path}{message}")):
        Config.from_yaml(path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"compute: \xff\xfe")
    with pytest.raises(ConfigError, match=r"yaml:1: not text in UTF-8: 'utf-8' codec can't decode byte 0xff"):
        Config.from_yaml(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}: it is a folder")):
        Config.from_yaml(tmp_path)


def test_a_number_may_be_written_without_a_point(tmp_path):
    path = write(tmp_path, "dataloader: {pad_value_dict: {a: 1e-3, b: -2E5}}")
    assert Config.from_yaml(path).dataloader.pad_value_dict == {"a": 1e-3, "b": -2e5}


def test_the_json_schema_accepts_every_key_that_is_written(config):
    schema = Config.model_json_schema()
    for name, values in config.to_dict().items():
        if isinstance(values, dict):
            definition = schema["properties"][name]["$ref"].rsplit("/", 1)[1]
            assert values.keys() == schema["$defs"][definition]["properties"].keys()
