"""Which options the families of models in transformers have."""

import inspect
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torchacc.config import nearest

_READ = re.compile(r'\bconfig\.(\w+)\b(?!\()|getattr\((?:self\.)?config, "(\w+)"')


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
    except Exception:  # it has looked at the value; what is wrong with it is told where all options are passed
        return True


def _read_by_models(cls: type) -> set[str]:
    """Return the names that the models beside a configuration's class read of it, by their source."""
    folder = Path(inspect.getfile(cls)).parent
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("modeling_*.py"))
    return {name for names in _READ.findall(code) for name in names if name and not name.startswith("_")}
