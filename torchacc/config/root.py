"""`Config`, the one object that a user fills in, and its two forms outside of Python: a dict and a YAML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field
from typing_extensions import Self

from torchacc.config.names import oddness, shown_name
from torchacc.config.sections import ComputeConfig, DataLoaderConfig, DistConfig, MemoryConfig, Section
from torchacc.config.yaml_file import NUMBER, YamlFile, parse
from torchacc.errors import ConfigError, in_one_line, shown


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which puts the string `1e-3` in quotes, as the loader would take it for a number."""


_Dumper.add_implicit_resolver(*NUMBER)

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
        if not isinstance(values, Mapping):
            raise ConfigError(f"Config.from_dict({shown(values)}): expected a dict of options by name")
        for name in values:
            if not isinstance(name, str):
                raise ConfigError(f"{shown_name(name)}: {oddness(name)}")
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
        file = YamlFile.read(path, example="backend: xla")
        try:
            return cls.from_dict(file.values)
        except ConfigError as error:
            raise file.located(error) from None

    def to_yaml(self, path: str | Path) -> None:
        """Write every option to a YAML file, which `from_yaml()` reads back to an equal config.

        Raises:
            ConfigError: An option holds what cannot be written to a file, such as a function; or there can be no such
                file.
        """
        try:
            text = yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False)
            parse(text, "the file")
            Path(path).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{shown(str(path))}: the config cannot be written there: {in_one_line(error)}") from None


def _refuse_functions(section: Section) -> None:
    for name, value in section.__dict__.items():
        if isinstance(value, Section):
            _refuse_functions(value)
        elif callable(value):
            raise ConfigError(
                f"{section.path_of(name)} = {shown(value)}: a function cannot be written to a file; "
                "set it in Python, after the file is read"
            )
