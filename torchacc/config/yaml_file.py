"""A YAML file of options: its values, and the line of each, so that an error can name it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from typing_extensions import Self, override

from torchacc.errors import ConfigError, in_one_line

_MAX_DEPTH = 64
"""Of values in values: far more than options have, and far less than Python's stack."""


class _Loader(yaml.SafeLoader):
    """The safe loader, to which `1e-3` is a number, as it is to YAML 1.2, and no string; its values are finite."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value, unless it lies in itself or too deep."""
        event = self.peek_event()
        problem = None
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._open:
            problem = f"*{event.anchor} lies in itself"
        elif len(self._open) > _MAX_DEPTH:
            problem = f"more than {_MAX_DEPTH} values in one another"
        if problem is not None:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=cast(yaml.Mark, event.start_mark))
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)

_MERGE = "tag:yaml.org,2002:merge"
"""The tag of a key `<<`, whose value's options stand in its place."""


@dataclass(frozen=True)
class YamlFile:
    """What a file holds, and where."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[str, int]
    """An option's dotted path -> its line."""

    @classmethod
    def read(cls, path: str | Path, example: str) -> Self:
        """Read a file whose values are options by name.

        Args:
            path: The file.
            example: A line that could stand in it, for the message where something else does.

        Raises:
            ConfigError: The file is a folder, not YAML, lies in itself, holds something else, or gives an option
                twice; names the file and line.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            lines = dict(_option_lines(yaml.compose(text, _Loader)))
            values = yaml.load(text, _Loader) or {}
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{path}:{line}: not YAML: {error.problem}") from None
        except IsADirectoryError:
            raise ConfigError(f"{path}: it is a folder; name the YAML file in it") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not YAML: {in_one_line(error)}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}:1: expected options such as `{example}`, found {values!r}")
        file = cls(Path(path), values, lines)
        try:
            refuse_odd_keys(values)
        except ConfigError as error:
            raise file.located(error) from None
        return file

    def located(self, error: ConfigError, parents: str = "", relative_to: str = "") -> ConfigError:
        """Return an error with the file and the line before each line of its message.

        Args:
            error: Its message's lines begin with an option's dotted path.
            parents: What that path lies under in the file, dotted.
            relative_to: The part of that path which `parents` stands for.
        """
        strip = f"{relative_to}." if relative_to else ""
        above = f"{parents}." if parents else ""
        return ConfigError("\n".join(self.at(f"{above}{line.removeprefix(strip)}") for line in str(error).splitlines()))

    def at(self, message: str) -> str:
        """Return a message that begins with an option's dotted path with the file and the line before it."""
        option = message.split(maxsplit=1)[0].rstrip(":")
        return f"{self.path}:{self.lines[option]}: {message}" if option in self.lines else f"{self.path}: {message}"


def refuse_odd_keys(values: Mapping[Any, Any], parents: str = "") -> None:
    """Refuse the name of an option that is no string, at any depth."""
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(f"{parents}{key}: the name of an option is a string, not {key!r}; put it in quotes")
        if isinstance(value, Mapping):
            refuse_odd_keys(value, f"{parents}{key}.")


def _option_lines(node: yaml.Node | None, parents: str = "") -> Iterator[tuple[str, int]]:
    """Yield each option's dotted path and line, and refuse one that is given twice, where YAML keeps the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        if key.tag == _MERGE:
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _option_lines(merged, parents)
            continue
        path = f"{parents}{key.value}"
        if path in seen:
            raise yaml.MarkedYAMLError(problem=f"{path} is given twice", problem_mark=key.start_mark)
        seen.add(path)
        yield path, key.start_mark.line + 1
        yield from _option_lines(value, f"{path}.")
