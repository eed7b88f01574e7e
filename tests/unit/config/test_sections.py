import copy
import logging
import pickle
import re

import pytest

from tests.logged import heard
from torchacc.config import Config, Section
from torchacc.errors import ConfigError


class GPT2Block:
    """Stands for a model's class."""


def test_options_are_assigned_one_by_one():
    config = Config()
    config.compute.bf16 = True
    config.dist.fsdp.size = 4
    config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}
    assert config == Config(compute={"bf16": True}, dist={"fsdp": {"size": 4, "wrap_layer_cls": ["GPT2Block"]}})


def test_a_dict_can_be_assigned_to_a_section():
    config = Config()
    config.dist.fsdp = {"size": 4}
    assert config.dist.fsdp.size == 4
    config.dist.fsdp.size = 2
    assert config.dist.fsdp.size == 2


def test_two_configs_share_nothing():
    first, second = Config(), Config()
    first.dist.fsdp.size = 4
    first.dist.topology.reverse()
    assert second == Config()


def test_axes_that_a_topology_leaves_out_follow_in_their_own_order():
    config = Config(dist={"topology": ["tp", "fsdp"]})
    assert config.dist.topology[:3] == ["tp", "fsdp", "dp"]
    assert sorted(config.dist.topology) == sorted(Config().dist.topology)


WRONG_NAMES = [
    (lambda config: setattr(config.dist.fsdp, "sise", 4), "dist.fsdp.sise = 4: there is no such option; did you mean"),
    (lambda config: setattr(config.dist, "fsdp", {"sise": 4}), "dist.fsdp.sise = 4: there is no such option; did you"),
    (lambda config: Config(dist={"fsdp": {"sise": 4}}), "dist.fsdp.sise = 4: there is no such option; did you mean"),
    (lambda config: Config.from_dict({"dist": {"fsdp": {"sise": 4}}}), "dist.fsdp.sise = 4: there is no such option"),
    (lambda config: setattr(config, "computer", {}), "computer = {}: there is no such option; did you mean 'compute'?"),
    (
        lambda config: setattr(config.dist.dp, "world", 2),
        "dist.dp.world = 2: there is no such option; valid names: size",
    ),
]


@pytest.mark.parametrize(("act", "message"), WRONG_NAMES)
def test_an_unknown_name_is_refused_with_its_path_and_the_nearest_name(act, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        act(Config())


WRONG_VALUES = [
    ("compute", "bf16", "yes", "compute.bf16 = 'yes': expected True or False"),
    ("compute", "bf16", 1, "compute.bf16 = 1: expected True or False"),
    ("dist.fsdp", "size", "4", "dist.fsdp.size = '4': expected a whole number"),
    ("dist.fsdp", "size", True, "dist.fsdp.size = True: expected a whole number"),
    ("dist.fsdp", "size", 4.0, "dist.fsdp.size = 4.0: expected a whole number"),
    ("dist.fsdp", "size", 0, "dist.fsdp.size = 0: expected at least 1"),
    ("dist", "fsdp", 4, "dist.fsdp = 4: expected a dict of the section's options, or the section itself"),
    ("dist", "topology", ["dp", "dp"], "dist.topology = ['dp', 'dp']: expected each axis at most once"),
    ("dataloader", "buckets", [128, "256"], "dataloader.buckets = [128, '256']: expected a whole number"),
    ("dataloader", "buckets", [], "dataloader.buckets = []: expected at least 1 item"),
    ("dataloader", "pad_value_dict", {"x": "0"}, "dataloader.pad_value_dict = {'x': '0'}: expected a whole number or"),
    ("dist.fsdp", "wrap_layer_cls", 3, "dist.fsdp.wrap_layer_cls = 3: expected a name, or a set or list of names"),
    ("dist.fsdp", "wrap_layer_cls", [3], "dist.fsdp.wrap_layer_cls = [3]: expected a string"),
    ("dist.fsdp", "wrap_modules", 3, "dist.fsdp.wrap_modules = 3: expected a name, or a set or list of names or a fun"),
    ("dist.fsdp", "sharding_strategy", "full_shard", "'NO_SHARD' or 'HYBRID_SHARD'; did you mean 'FULL_SHARD'?"),
    ("dist.fsdp", "backward_prefetch", 3, "backward_prefetch = 3: expected 'BACKWARD_PRE', 'BACKWARD_POST' or 'NONE'"),
]


@pytest.mark.parametrize(("section", "name", "value", "message"), WRONG_VALUES)
def test_a_wrong_value_is_refused_at_the_assignment_and_leaves_the_config_as_it_was(section, name, value, message):
    config = Config()
    target = config
    for part in section.split("."):
        target = getattr(target, part)
    with pytest.raises(ConfigError, match=re.escape(message)):
        setattr(target, name, value)
    assert config == Config()


def test_every_wrong_option_is_named_at_once():
    with pytest.raises(ConfigError) as raised:
        Config(backend="tpu", dist={"fsdp": {"size": "x", "sise": 4}})
    assert str(raised.value).splitlines() == [
        "backend = 'tpu': expected 'auto', 'xla' or 'native'",
        "dist.fsdp.size = 'x': expected a whole number",
        "dist.fsdp.sise = 4: there is no such option; did you mean 'size'?",
    ]


@pytest.mark.parametrize(
    "value", ["GPT2Block", GPT2Block, {"GPT2Block"}, [GPT2Block], ("GPT2Block",), frozenset({GPT2Block})]
)
def test_classes_to_wrap_are_stored_as_a_set_of_names(value):
    config = Config()
    config.dist.fsdp.wrap_layer_cls = value
    assert config.dist.fsdp.wrap_layer_cls == {"GPT2Block"}


def test_modules_to_wrap_are_patterns_or_a_function():
    def is_block(name, module):
        return True

    config = Config()
    config.dist.fsdp.wrap_modules = "transformer.h.*"
    assert config.dist.fsdp.wrap_modules == {"transformer.h.*"}
    config.dist.fsdp.wrap_modules = is_block
    assert config.dist.fsdp.wrap_modules is is_block


@pytest.mark.parametrize(
    ("given", "stored"),
    [("auto", "auto"), ("xla", "xla"), ("lazy", "xla"), ("native", "native"), ("eager", "native")],
)
def test_torchaccs_backends_have_our_names(given, stored):
    config = Config()
    config.backend = given
    assert config.backend == stored


def test_a_frozen_config_refuses_every_assignment():
    config = Config()
    config.freeze()
    with pytest.raises(ConfigError, match=r"dist\.fsdp\.size = 4: resolved configs are frozen: change your own Config"):
        config.dist.fsdp.size = 4
    with pytest.raises(ConfigError, match="resolved configs are frozen"):
        config.dist = {}


def test_a_deep_copy_is_equal_separate_and_assignable():
    config = Config(dist={"fsdp": {"wrap_layer_cls": {"Block"}}})
    config.freeze()
    copied = copy.deepcopy(config)
    assert copied == config
    copied.dist.fsdp.wrap_layer_cls.add("Other")
    copied.dist.fsdp.size = 2
    assert config == Config(dist={"fsdp": {"wrap_layer_cls": {"Block"}}})


def test_a_deep_copy_does_not_copy_the_object_behind_a_method():
    class Model:
        def shard(self, output, mesh):
            pass

    model = Model()
    config = Config(dist={"fsdp": {"shard_output_callable": model.shard}})
    assert copy.deepcopy(config).dist.fsdp.shard_output_callable.__self__ is model


def test_a_config_can_be_sent_to_another_process():
    config = Config(dist={"fsdp": {"size": 4}})
    config.freeze()
    received = pickle.loads(pickle.dumps(config))
    assert received == config
    with pytest.raises(ConfigError, match="frozen"):
        received.dist.fsdp.size = 2


def options(section):
    """Yield every option's path and its field, through all sections."""
    for name, field in type(section).model_fields.items():
        yield section.path_of(name), field
        if isinstance(getattr(section, name), Section):
            yield from options(getattr(section, name))


def test_every_option_is_described():
    assert [path for path, field in options(Config()) if not field.description] == []


def test_every_section_knows_its_path():
    paths = [path for path, _ in options(Config())]
    assert len(paths) == len(set(paths))
    assert {"backend", "compute", "compute.bf16", "dist", "dist.dp", "dist.dp.size", "dist.fsdp.use_spmd"} < set(paths)


def test_a_change_after_accelerate_is_said_to_be_for_later_calls(caplog):
    caplog.set_level(logging.INFO, "torchacc")
    config = Config()
    config.note_use()
    with heard(logging.INFO) as said:
        config.compute.bf16 = False  # as it was
        assert not said
        config.compute.bf16 = True
        config.compute.fp8 = False
    (line,) = said
    assert line.startswith("config.compute.bf16 = True is for models that accelerate() is given from now on")
    assert config.compute.bf16
    with heard(logging.INFO) as said:
        copy.deepcopy(config).memory.gc = True
    assert not said
