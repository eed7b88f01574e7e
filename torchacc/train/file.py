"""A training file: all of it is read and checked, so that a mistake in any stage is reported before one starts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

from torchacc.config import Config, Section
from torchacc.config.names import nearest
from torchacc.config.yaml_file import YamlFile
from torchacc.errors import ConfigError, shown
from torchacc.train.config import DistributedConfig, LoggingConfig, StageConfig, StageFSDPConfig, TopConfig, WandbConfig
from torchacc.train.families import MODEL_PREFIX, check_model_section
from torchacc.train.optim import check_options

_ELSEWHERE = {"backend": "distributed.engine"}
"""Options of `torchacc.Config` that a training file has its own place for."""

_MAX_NAME = 100
"""Bytes of a stage's name: file systems take 255, and it is a part of other names."""

S = TypeVar("S", bound=Section)
T = TypeVar("T")


@dataclass(frozen=True)
class TrainFile:
    """What a training file says."""

    path: Path
    output_dir: Path
    stages: Mapping[str, StageConfig]
    presets: Mapping[str, DistributedConfig]
    models: Mapping[str, Mapping[str, Any]]
    """Model configs, by the names of their sections."""
    logging: LoggingConfig
    wandb: WandbConfig
    source: YamlFile
    """Where each option stands."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file, and check every section of it.

        Raises:
            ConfigError: The file is missing or not YAML, or something in it is wrong; names the file and the line.
        """
        source = YamlFile.read(path, example="training_stages: …")
        try:
            return cls._of(source)
        except ConfigError as error:
            raise source.located(error) from None

    @classmethod
    def _of(cls, source: YamlFile) -> Self:
        """Check all values; errors begin with an option's path."""
        models = {name: value for name, value in source.values.items() if name.startswith(MODEL_PREFIX)}
        top = _section(TopConfig, {k: v for k, v in source.values.items() if k not in models}, "")
        if not top.training_stages:
            raise ConfigError("training_stages: there is none; write `training_stages: {stage1: {}}`")
        for name, model in models.items():
            check_model_section(name, model)
        return cls(
            path=source.path,
            output_dir=Path(top.output_dir).expanduser(),
            stages=_stages(top.training_stages),
            presets=_sections(DistributedConfig, top.distributed_examples, "distributed_examples"),
            models=models,
            logging=top.logging,
            wandb=top.wandb,
            source=source,
        )

    def stage(self, name: str | None) -> tuple[str, StageConfig]:
        """Return a stage and its name; the file's first for None.

        Raises:
            ConfigError: There is none of this name.
        """
        name = next(iter(self.stages)) if name is None else name
        return name, self._named("stage", "training_stages", name, self.stages)

    def preset(self, name: str) -> DistributedConfig:
        """Return a `distributed` section of `distributed_examples`.

        Raises:
            ConfigError: There is none of this name.
        """
        return self._named("preset", "distributed_examples", name, self.presets)

    def model(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """Return the name of a model config's section and the config; the leading `model_config_` may be left out.

        Raises:
            ConfigError: There is none of this name.
        """
        full = name if name.startswith(MODEL_PREFIX) else f"{MODEL_PREFIX}{name}"
        return full, self._named("model config", f"the sections {MODEL_PREFIX}…", full, self.models)

    def _named(self, kind: str, where: str, name: str, among: Mapping[str, T]) -> T:
        if name not in among:
            hint = nearest(name, among) if among else "the file has none"
            raise ConfigError(f"{self.path}: there is no {kind} {shown(name)} in {where}; {hint}")
        return among[name]


def _stages(values: Mapping[str, Any]) -> dict[str, StageConfig]:
    for name in values:
        if "/" in name or name.startswith(".") or not name.strip() or not name.isprintable():
            problem = "a stage's name is that of its folder: letters, without '/', and no '.' at its beginning"
            raise ConfigError(f"training_stages.{name}: {problem}")
        if len(name.encode()) > _MAX_NAME:
            raise ConfigError(f"training_stages.{name}: a folder's name has {_MAX_NAME} bytes at most")
    stages = _sections(StageConfig, values, "training_stages")
    for name, stage in stages.items():
        with _below(f"training_stages.{name}.torchacc"):
            _check_torchacc(stage.torchacc)
        with _below(f"training_stages.{name}"):
            check_options(stage.optimizer.name, stage.optimizer.options)
        _check_order(stages, name)
    return stages


def _check_order(stages: Mapping[str, StageConfig], name: str) -> None:
    """Check that a stage starts from none that starts from it, by way of others or at once."""
    before, passed = stages[name].init_from, [name]
    at = f"training_stages.{name}.init_from = {shown(before)}"
    if before == name:
        raise ConfigError(f"{at}: a stage cannot start from itself; training.resume lets it go on")
    while before is not None and before in stages and before not in passed:
        passed.append(before)
        before = stages[before].init_from
    if before == name:
        raise ConfigError(f"{at}: {' from '.join([*passed, name])}: none of them could be trained first")


def _check_torchacc(values: Mapping[str, Any]) -> None:
    Config.from_dict(values)
    for name in _ELSEWHERE.keys() & values.keys():
        raise ConfigError(f"{name} = {shown(values[name])}: in a training file this is {_ELSEWHERE[name]}")
    fsdp = (values.get("dist") or {}).get("fsdp") or {}
    for name in StageFSDPConfig.model_fields.keys() & fsdp.keys():
        raise ConfigError(f"dist.fsdp.{name} = {shown(fsdp[name])}: in a training file this is distributed.fsdp.{name}")


def _sections(cls: type[S], values: Mapping[str, Any], parents: str) -> dict[str, S]:
    return {name: _section(cls, value, f"{parents}.{name}") for name, value in values.items()}


def _section(cls: type[S], values: Any, at: str) -> S:
    """Make a section of what stands at a place in the file."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"{at} = {shown(values)}: expected options by name, as for {cls.__doc__}")
    with _below(at, relative_to=cls.path):
        return cls(**values)


@contextmanager
def _below(parents: str, relative_to: str = "") -> Iterator[None]:
    """Context manager whose errors begin with a section's place in the file.

    Args:
        parents: The place, dotted.
        relative_to: What the options in the errors begin with instead of it.
    """
    above = f"{parents}." if parents else ""
    try:
        yield
    except ConfigError as error:
        lines = str(error).splitlines()
        stripped = (line.removeprefix(f"{relative_to}." if relative_to else "") for line in lines)
        raise ConfigError("\n".join(f"{above}{line}" for line in stripped)) from None
