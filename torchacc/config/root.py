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
    """The options of `accelerate()`, as plain data, which it does not modify."""

    backend: Backend = "auto"
    """What shards the model: torch_xla (`xla`), PyTorch's own FSDP (`native`), or the one that suits the machine
    (`auto`). TorchAcc's names `lazy` and `eager` mean `xla` and `native`."""
    compute: ComputeConfig = Field(default_factory=ComputeConfig)
    """Dtypes and kernels of the computation."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """Options that trade time for device memory."""
    dataloader: DataLoaderConfig = Field(default_factory=DataLoaderConfig)
    """Padding and prefetching of batches."""
    dist: DistConfig = Field(default_factory=DistConfig)
    """The axes over which the work is spread."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a config from nested dicts, such as those of `to_dict()`. Missing options have their defaults.

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
        """Read a config from a YAML file. Missing options have their defaults.

        Raises:
            ConfigError: The file is not YAML, or an option is wrong; the message names the file and the line.
        """
        file = YamlFile.read(path, example="backend: xla")
        try:
            return cls.from_dict(file.values)
        except ConfigError as error:
            raise file.located(error) from None

    def to_yaml(self, path: str | Path) -> None:
        """Write every option to a YAML file, which `from_yaml()` reads back to an equal config.

        Raises:
            ConfigError: An option has a value that cannot be written to a file, such as a function; or the file cannot
                be written.
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
