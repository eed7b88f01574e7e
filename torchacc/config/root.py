"""`Config`, the one object that a user fills in, and its two forms outside of Python: a dict and a YAML file."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field
from typing_extensions import Self

from torchacc.config.sections import ComputeConfig, DataLoaderConfig, DistConfig, MemoryConfig, Section
from torchacc.errors import ConfigError

_TORCHACC_BACKENDS = {"lazy": "xla", "eager": "native"}


def _rename_backend(value: Any) -> Any:
    return _TORCHACC_BACKENDS.get(value, value) if isinstance(value, str) else value


Backend = Annotated[Literal["auto", "xla", "native"], BeforeValidator(_rename_backend)]


class Config(Section):
    """What to train with: plain data that `accelerate()` reads, and never changes."""

    backend: Backend = "auto"
    """Who carries the sharding out: torch_xla (`xla`), PyTorch's own FSDP (`native`), or whichever suits the machine
    (`auto`). TorchAcc's `lazy` and `eager` mean `xla` and `native`."""
    compute: ComputeConfig = Field(default_factory=ComputeConfig)
    """What the devices compute in."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """What is given up to hold less in a device's memory."""
    dataloader: DataLoaderConfig = Field(default_factory=DataLoaderConfig)
    """How batches are padded and prefetched."""
    dist: DistConfig = Field(default_factory=DistConfig)
    """How the work is spread over devices."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a config of nested dicts, as `to_dict()` returns them; options left out have their defaults.

        Raises:
            ConfigError: A name or a type is wrong.
        """
        _refuse_odd_keys(values)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return every option as plain data: dicts, lists, strings, numbers, booleans and None.

        Raises:
            ConfigError: An option holds a function, which cannot be written to a file.
        """
        _refuse_functions(self)
        return self.model_dump()

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a config from a YAML file; options left out have their defaults.

        Raises:
            ConfigError: The file is not YAML, or an option in it is wrong; names the file and the line.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            lines = dict(_option_lines(yaml.compose(text, yaml.SafeLoader)))
            values = yaml.safe_load(text) or {}
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(f"{path}:{line}: not YAML: {error.problem}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}:1: expected options such as `backend: xla`, found {values!r}")
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError("\n".join(_locate(path, message, lines) for message in str(error).splitlines())) from None

    def to_yaml(self, path: str | Path) -> None:
        """Write every option to a YAML file, which `from_yaml()` reads back to an equal config.

        Raises:
            ConfigError: An option holds a function, which cannot be written to a file.
        """
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


def _refuse_odd_keys(values: Mapping[Any, Any], parents: str = "") -> None:
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(f"{parents}{key}: the name of an option is a string, not {key!r}; put it in quotes")
        if isinstance(value, Mapping):
            _refuse_odd_keys(value, f"{parents}{key}.")


def _refuse_functions(section: Section) -> None:
    for name, value in section.__dict__.items():
        if isinstance(value, Section):
            _refuse_functions(value)
        elif callable(value):
            raise ConfigError(
                f"{section.path_of(name)} = {value!r}: a function cannot be written to a file; "
                "set it in Python, after the file is read"
            )


def _option_lines(node: yaml.Node | None, parents: str = "") -> Iterator[tuple[str, int]]:
    """Yield each option's dotted path and line, and refuse one that is given twice, where YAML keeps the last."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        path = f"{parents}{key.value}"
        if path in seen:
            raise yaml.MarkedYAMLError(problem=f"{path} is given twice", problem_mark=key.start_mark)
        seen.add(path)
        yield path, key.start_mark.line + 1
        yield from _option_lines(value, f"{path}.")


def _locate(path: str | Path, message: str, lines: Mapping[str, int]) -> str:
    """Put the file and the line before a message, which begins with the option's dotted path."""
    option = message.split(maxsplit=1)[0].rstrip(":")
    return f"{path}:{lines[option]}: {message}" if option in lines else f"{path}: {message}"
