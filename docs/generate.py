"""Write the pages of docs/reference/ that come from the code: `python docs/generate.py`. A test holds them equal."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchacc.cli.main import COMMANDS, command_module
from torchacc.config import Config
from torchacc.engines.registry import ENGINES, engine_class
from torchacc.train.config import StageConfig, TopConfig

FOLDER = Path(__file__).with_name("reference")
NOTE = "<!-- Written by docs/generate.py: change the code, then run it. -->"

CONFIG = """# Config reference

Every option of `torchacc.Config`: in Python `config.dist.fsdp.size = 4`, in a dict or a YAML file the same names in one
another. Unknown names, wrong types and contradictions are refused, most of them at the assignment. `null` is `None`.
"""
TRAINING_FILE = """# Training file reference

Every option of the YAML file of [the trainer](../trainer.md), which says how they work together. Beside these, sections
`model_config_<name>` describe models: `model_type` and the options of that family in transformers, or `pretrained`.
"""
COMMAND_LINE = """# Command reference

Every option of every command, as `torchacc COMMAND --help` says them; [commands](../commands.md) says more of what they
are for. `torchacc --traceback COMMAND …` lets errors end with a traceback.
"""


def main() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return the text of each page, by its file's name."""
    stage = _sections(StageConfig.model_json_schema(by_alias=True), "", "`training_stages.<name>`", {})
    return {
        "config.md": _page(CONFIG, _sections(Config.model_json_schema(), "", "Config", _remarks())),
        "training_file.md": _page(TRAINING_FILE, _sections(TopConfig.model_json_schema(), "", "Top level", {}), stage),
        "commands.md": _page(COMMAND_LINE, *(_command(name, purpose) for name, purpose in COMMANDS.items())),
    }


def _page(beginning: str, *parts: Iterator[str]) -> str:
    title, _, text = beginning.partition("\n")
    return "\n".join([title, "", NOTE, text.rstrip(), *(line for part in parts for line in part), ""])


# Options of a config


def _remarks() -> dict[str, list[str]]:
    """Return what is said of an option beside its own sentence: that it has no effect, and why."""
    remarks: dict[str, list[str]] = {}
    reasons: dict[tuple[str, str], list[str]] = {}
    for kind in ENGINES:
        for path, reason in engine_class(kind).no_effect.items():
            reasons.setdefault((path, reason), []).append(f"`{kind}`")
    for (path, reason), kinds in reasons.items():
        remarks.setdefault(path, []).append(f"No effect in {', '.join(kinds)}: {reason}.")
    return remarks


def _sections(
    section: Mapping[str, Any],
    path: str,
    title: str,
    remarks: Mapping[str, list[str]],
    definitions: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yield the lines of a section of a JSON schema, and of those below it."""
    definitions = section["$defs"] if definitions is None else definitions
    below = []
    yield from ["", f"## {title}", "", section["description"], ""]
    rows = []
    for name, option in section["properties"].items():
        full = f"{path}.{name}" if path else name
        inner = _inner(option, definitions)
        if inner is not None:
            below.append((full, inner))
            continue
        text = " ".join([" ".join(option["description"].split()), *remarks.get(full, [])])
        default = _value(option.get("default", {}))
        rows.append(f"| `{name}` | {_values(option)} | {default} | {_cell(text)} |")
    if rows:
        yield from ["| option | values | default | |", "|---|---|---|---|", *rows]
    for full, inner in below:
        yield from _sections(inner, full, f"`{full}`", remarks, definitions)


def _inner(option: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section that an option is; None for a plain value."""
    for choice in [option, *option.get("anyOf", [])]:
        if "$ref" in choice:
            return definitions[choice["$ref"].rpartition("/")[2]]
    return None


def _values(schema: Mapping[str, Any]) -> str:
    """Return what an option may be, in words."""
    if "anyOf" in schema:
        return " or ".join(map(_values, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(map(_value, schema.get("enum", [schema.get("const")])))
    if "type" not in schema:
        return "anything"
    kind = schema["type"]
    if kind == "array":
        return f"list of {_inside(schema['items'])}"
    if kind == "object":
        inside = schema.get("additionalProperties")
        return f"dict of {_inside(inside)}" if isinstance(inside, Mapping) else "dict"
    if kind == "null":  # to a schema a function is one too, as no file can hold it
        return "a function" if schema.get("title") == "function" else "`null`"
    words = {"boolean": "`true`, `false`", "integer": "int", "number": "float", "string": "str"}
    return " ".join([words[kind], *_limits(schema)])


def _inside(schema: Mapping[str, Any]) -> str:
    text = _values(schema)
    return f"({text})" if " or " in text else text


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}
    yield from (f"{word} {schema[key]}" for key, word in words.items() if key in schema)


def _value(value: Any) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# Options of commands


def _command(name: str, purpose: str) -> Iterator[str]:
    module = command_module(name)
    parser = argparse.ArgumentParser(add_help=False)
    module.add_options(parser)
    yield from ["", f"## torchacc {name}", "", f"{purpose[0].upper()}{purpose[1:]}.", ""]
    yield from ["| option | |", "|---|---|", *map(_argument, parser._actions), ""]
    yield from ["```text", *module.EXAMPLES, "```"]


def _argument(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
    names = [" ".join(filter(None, [option, value])) for option in action.option_strings] or [value or action.dest]
    text = (action.help or "") % vars(action)
    if action.required and action.option_strings:
        text = f"required: {text}"
    return f"| {', '.join(f'`{name}`' for name in names)} | {_cell(text)} |"


if __name__ == "__main__":
    main()
