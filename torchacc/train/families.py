"""A section `model_config_…`: which families of models transformers has, and which options each of them."""

import inspect
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torchacc.config.names import did_you_mean, nearest
from torchacc.errors import ConfigError, in_one_line, shown

MODEL_PREFIX = "model_config_"
"""What the names of these sections begin with."""
_MAX_LAYERS = 10_000
"""Of a model: a configuration alone lists as many, and all of them are built to be checked."""
_READ = re.compile(r'\bconfig\.(\w+)\b(?!\()|getattr\((?:self\.)?config, "(\w+)"')


def check_model_section(name: str, values: Any) -> None:
    """Check that a section names a family, and only options that the family has, or a pretrained model alone.

    Args:
        name: The section's name.
        values: What it holds.

    Raises:
        ConfigError: It begins with the option's path.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{name} = {shown(values)}: expected `model_type: …` and the options of that family")
    if "pretrained" not in values:
        _check_family(name, values)
    elif not isinstance(values["pretrained"], str):
        raise ConfigError(f"{name}.pretrained = {shown(values['pretrained'])}: expected a folder or a hub name")
    elif len(values) > 1:
        other = next(key for key in values if key != "pretrained")
        raise ConfigError(
            f"{name}.{other} beside {name}.pretrained = {shown(values['pretrained'])}: what that names says all of the "
            f"model, so leave {other} out. (For adapters, such as LoRA, use the Hugging Face Trainer)"
        )


def _check_family(name: str, values: Mapping[str, Any]) -> None:
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if "model_type" not in values:
        raise ConfigError(f"{name}: model_type is missing; write the family, such as model_type: gpt2")
    family = values["model_type"]
    if not isinstance(family, str) or family not in CAUSAL or family not in CONFIG_MAPPING:
        kind = "causal language models" if isinstance(family, str) and family in CONFIG_MAPPING else "models"
        hint = did_you_mean(str(family), CAUSAL) or "choose one such as gpt2 or llama"
        raise ConfigError(
            f"{name}.model_type: model_type = {shown(family)} is not a family of {kind} in transformers; {hint}"
        )
    for option, value in values.items():
        if "layer" in option and type(value) is int and value > _MAX_LAYERS:
            raise ConfigError(f"{name}.{option} = {value}: a model has {_MAX_LAYERS:,} layers at most")
    for option, hint in unknown_options(values):
        raise ConfigError(f"{name}.{option} = {shown(values[option])}: {family} has no such option; {hint}")
    try:
        AutoConfig.for_model(**values)
    except Exception as error:  # transformers has several classes for it
        raise ConfigError(f"{name}: transformers refuses it: {in_one_line(error)}") from None
    names = AutoConfig.for_model(family).attribute_map
    for option in ("num_hidden_layers", names.get("num_hidden_layers")):
        if isinstance(values.get(option), int) and values[option] < 1:
            raise ConfigError(f"{name}.{option} = {values[option]}: a model has at least one layer")


def unknown_options(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each option that a family does not have, and a hint at the nearest one.

    A configuration of transformers takes any name, and keeps what it does not know: an option is one that the class
    declares or turns into another, or that the family's models read.

    Args:
        options: `model_type`, and what is passed to the class of that configuration.
    """
    from transformers import CONFIG_MAPPING, GenerationConfig

    cls = CONFIG_MAPPING[options["model_type"]]
    try:
        defaults = cls()
    except Exception:  # a family whose options have no defaults: made with those given, it says what is wrong
        return
    declared = {name for name in vars(defaults) if not name.startswith("_")} | {*cls.attribute_map, "model_type"}
    dropped = GenerationConfig().to_dict().keys()
    for name in sorted(options.keys() - declared):
        if name in dropped or not _turns_into_another(cls, name, options[name]):
            read = _read_by_models(cls)
            if name not in read:
                yield name, nearest(name, declared | read)


def _turns_into_another(cls: type, name: str, value: Any) -> bool:
    """Return whether a configuration's class does more with an option than to keep it."""
    try:
        return not name.startswith("_") and name not in vars(cls(**{name: deepcopy(value)}))
    except Exception:  # it has looked at the value; what is wrong with it is reported where all options are passed
        return True


def _read_by_models(cls: type) -> set[str]:
    """Return the names that the models beside a configuration's class read of it, by their source."""
    folder = Path(inspect.getfile(cls)).parent
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py"))
    return {name for names in _READ.findall(code) for name in names if name and not name.startswith("_")}
