"""A YAML file of options: its values, and the line of each, so that an error can name it.

Of YAML it takes plain values of bounded size, each option once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from typing_extensions import Self, override

from torchacc.config.names import oddness, shown_name
from torchacc.config.text_file import read_text
from torchacc.errors import ConfigError, in_one_line, shown

_MAX_DEPTH = 64
"""Of values in values: far more than options have, and far less than Python's stack."""
_MAX_VALUES = 20_000
"""Of a file, with its aliases written out: some ten times of what the largest has."""
_CHARACTERS_OF_A_VALUE = 50
"""A longer value counts as several."""
_MAX_DIGITS = 40
_MAX_LENGTH = 4096
"""Of a string: that of the longest path."""
_MAX_PATH = 1000
"""Characters of a dotted path whose line is kept; no option lies that deep."""

_TAG = "tag:yaml.org,2002:"
_NULLS = ("", "~", "null", "Null", "NULL")


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
            ConfigError: The file cannot be read, is not YAML, holds something else, or gives an option twice; names the
                file and the line.
        """
        values, lines = parse(read_text(path), str(path))
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise ConfigError(f"{path}:1: expected options such as `{example}`, found {shown(values)}")
        return cls(Path(path), values, lines)

    def located(self, error: ConfigError) -> ConfigError:
        """Return an error with the file and the line before each line of its message, an option's dotted path."""
        return ConfigError("\n".join(map(self.at, str(error).splitlines())))

    def at(self, message: str) -> str:
        """Return a message that begins with an option's dotted path with the file and the line before it."""
        option = message.partition(" ")[0].rstrip(":")
        return f"{self.path}:{self.lines[option]}: {message}" if option in self.lines else f"{self.path}: {message}"


class _Loader(yaml.SafeLoader):
    """The safe loader, to which `1e-3` is a number, as it is to YAML 1.2, and no string; its documents are bounded."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []
        self._num_values = 0
        self._num_values_of: dict[str, int] = {}

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value, unless it lies in itself, too deep, or is one too many."""
        event = self.peek_event()
        before = self._num_values
        self._count(event)
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        if event.anchor is not None and not isinstance(event, yaml.AliasEvent):
            self._num_values_of[event.anchor] = self._num_values - before
        return node

    def _count(self, event: Any) -> None:
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                raise _RefusedError(f"not YAML: *{event.anchor} lies in itself", mark)
            self._num_values += self._num_values_of.get(str(event.anchor), 0)
        elif isinstance(event, yaml.ScalarEvent):
            self._num_values += 1 + len(event.value) // _CHARACTERS_OF_A_VALUE
        else:
            self._num_values += 1
        if len(self._open) > _MAX_DEPTH:
            raise _RefusedError(f"not YAML: more than {_MAX_DEPTH} values in one another", mark)
        if self._num_values > _MAX_VALUES:
            raise _RefusedError(f"more than {_MAX_VALUES:,} values, with aliases written out", mark)


NUMBER = (f"{_TAG}float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))
"""How a loader and a dumper tell a number without a point from a string."""
_Loader.add_implicit_resolver(*NUMBER)


class _RefusedError(Exception):
    """What a document holds, and options do not; its message ends with the place."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(problem)
        self.mark = mark


def parse(text: str, name: str) -> tuple[Any, Mapping[str, int]]:
    """Return what a document says, and each option's dotted path -> its line.

    Args:
        text: The document.
        name: What errors begin with, such as the file's path.

    Raises:
        ConfigError: It is not YAML, gives an option twice, or holds what no option is; names line and column.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:  # it looks through all of the text for control characters
        before = text[: error.position]
        line, column = before.count("\n") + 1, error.position - before.rfind("\n")
        problem = f"not YAML: the character {text[error.position]!r} cannot be printed"
        raise ConfigError(f"{name}:{line}: {problem}, in column {column}") from None
    try:
        values = _Values(loader)
        node = loader.get_single_node()
        return (None if node is None else values.value(node, "", 0)), values.lines
    except _RefusedError as error:
        problem, mark = str(error), error.mark
    except yaml.MarkedYAMLError as error:
        problem, mark = f"not YAML: {error.problem or error.context}", error.problem_mark or loader.get_mark()
    except Exception as error:  # PyYAML's scanner takes escapes and versions for numbers that Python does not know
        problem, mark = f"not YAML: {in_one_line(error)}", loader.get_mark()
    problem = "".join(char if char.isprintable() else "?" for char in problem[:700])
    raise ConfigError(f"{name}:{mark.line + 1}: {problem}, in column {mark.column + 1}") from None


_Options = dict[str, tuple[yaml.Node, yaml.Node]]
"""An option's name -> the nodes of the name and of the value."""


@dataclass
class _Values:
    """Makes values of a document's nodes, and notes where options stand."""

    loader: _Loader
    lines: dict[str, int] = field(default_factory=dict)

    def value(self, node: yaml.Node, path: str, depth: int) -> Any:
        _check_depth(node, depth)  # once more, as aliases add to it
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, f"{path}[]", depth + 1) for item in node.value]
        raise _RefusedError(f"{_at(path)}the tag {_short(node.tag)} makes no option's value", node.start_mark)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        values = {}
        for name, (key, value) in self._options(node, path, depth).items():
            below = _join(path, name)
            if len(below) <= _MAX_PATH:
                self.lines[below] = key.start_mark.line + 1
            values[name] = self.value(value, below, depth + 1)
        return values

    def _options(self, node: yaml.MappingNode, path: str, depth: int) -> _Options:
        """Return a mapping's options; those that `<<` brings come first, and yield to its own."""
        _check_depth(node, depth)
        own: _Options = {}
        merged: _Options = {}
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                if merged:
                    raise _RefusedError("not YAML: << is given twice; write <<: [*one, *other]", key.start_mark)
                merged = self._merged(value, path, depth + 1)
                continue
            name = self._name(key, path)
            if name in own:
                raise _RefusedError(f"not YAML: {_join(path, name)} is given twice", key.start_mark)
            own[name] = (key, value)
        return {**merged, **own}

    def _merged(self, value: yaml.Node, path: str, depth: int) -> _Options:
        found: _Options = {}
        for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if not isinstance(mapping, yaml.MappingNode):
                raise _RefusedError(f"{_at(path)}<< takes options by name, or a list of such", mapping.start_mark)
            for name, option in self._options(mapping, path, depth).items():
                found.setdefault(name, option)  # the first of a list wins
        return found

    def _name(self, key: yaml.Node, path: str) -> str:
        if not isinstance(key, yaml.ScalarNode):
            raise _RefusedError(f"{_at(path)}the name of an option is a string, and no list or mapping", key.start_mark)
        name = self._scalar(key, path)
        problem = oddness(name)
        if problem:
            raise _RefusedError(f"{_join(path, shown_name(name))}: {problem}", key.start_mark)
        return cast(str, name)

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        problem = f"{shown(text)}, with the tag {_short(node.tag)}, is not an option's value"
        if kind == "str":
            if len(text) <= _MAX_LENGTH and not _NO_TEXT.search(text):
                return text
            what = (
                "a character that no text has" if len(text) <= _MAX_LENGTH else f"more than {_MAX_LENGTH:,} characters"
            )
            problem = f"{shown(text)} holds {what}"
        elif kind == "null" and text in _NULLS:
            return None
        elif kind in _NUMBERS and len(text) > _MAX_DIGITS:
            problem = f"a number of {len(text):,} digits is not an option's value"
        elif kind in _NUMBERS and _OTHER_BASE.match(text):
            problem = f"{text} is a number in base 8 or 60 to YAML; write it in base 10, or put it in quotes"
        elif kind in _CONSTRUCTORS:
            try:
                return _CONSTRUCTORS[kind](self.loader, node)
            except (ValueError, LookupError):
                problem = f"{shown(text)} is not a valid {kind}"
        elif kind in _OTHERS:
            problem = f"{shown(text)} is {_OTHERS[kind]} to YAML; put it in quotes"
        raise _RefusedError(f"{_at(path)}{problem}", node.start_mark)


_NUMBERS = ("int", "float")
_CONSTRUCTORS = {
    "bool": yaml.SafeLoader.construct_yaml_bool,
    "int": yaml.SafeLoader.construct_yaml_int,
    "float": yaml.SafeLoader.construct_yaml_float,
}
_OTHERS = {"timestamp": "a date", "value": "a default"}
_OTHER_BASE = re.compile(r"[-+]?0[0-7_]+$|[^:]*:")
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""What neither a path nor UTF-8 can hold."""


def _check_depth(node: yaml.Node, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise _RefusedError(f"not YAML: more than {_MAX_DEPTH} values in one another", node.start_mark)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _at(path: str) -> str:
    return f"{path[:_MAX_PATH]}: " if path else ""


def _short(tag: str) -> str:
    return shown(tag.replace(_TAG, "!!"))
