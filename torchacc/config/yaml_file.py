"""A YAML file of options: its values, and the line of each, so that an error can name it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from torchacc.config.text_file import read_text
from torchacc.config.yaml_values import parse
from torchacc.errors import ConfigError, shown


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
        option = message.partition(" ")[0].rstrip(":")
        return f"{self.path}:{self.lines[option]}: {message}" if option in self.lines else f"{self.path}: {message}"
