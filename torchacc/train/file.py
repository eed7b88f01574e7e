"""A training file: read whole and checked whole, so that a mistake in any stage is told before one of them starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

from torchacc.config import Config, Section, nearest
from torchacc.config.sections import did_you_mean
from torchacc.config.yaml_file import YamlFile
from torchacc.errors import ConfigError, in_one_line, shown
from torchacc.train.config import DistributedConfig, LoggingConfig, StageConfig, StageFSDPConfig, TopConfig, WandbConfig
from torchacc.train.families import unknown_options
from torchacc.train.optim import check_options

_MODEL = "model_config_"
_ELSEWHERE = {"backend": "distributed.engine"}
"""Options of `torchacc.Config` that a training file has its own place for."""

_MAX_NAME = 100
"""Bytes of a stage's name: file systems take 255, and it is a part of other names."""
_MAX_LAYERS = 10_000
"""Of a model: a configuration alone lists as many, and all of them are built to be checked."""

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
        models = {name: value for name, value in source.values.items() if name.startswith(_MODEL)}
        top = _section(source, TopConfig, {k: v for k, v in source.values.items() if k not in models}, "")
        if not top.training_stages:
            raise ConfigError(source.at("training_stages: there is none; write `training_stages: {stage1: {}}`"))
        for name, model in models.items():
            _check_model(source, name, model)
        return cls(
            path=Path(path),
            output_dir=Path(top.output_dir).expanduser(),
            stages=_stages(source, top.training_stages),
            presets=_sections(source, DistributedConfig, top.distributed_examples, "distributed_examples"),
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
        full = name if name.startswith(_MODEL) else f"{_MODEL}{name}"
        return full, self._named("model config", f"the sections {_MODEL}…", full, self.models)

    def _named(self, kind: str, where: str, name: str, among: Mapping[str, T]) -> T:
        if name not in among:
            hint = nearest(name, among) if among else "the file has none"
            raise ConfigError(f"{self.path}: there is no {kind} {shown(name)} in {where}; {hint}")
        return among[name]


def _stages(source: YamlFile, values: Mapping[str, Any]) -> dict[str, StageConfig]:
    for name in values:
        if "/" in name or name.startswith(".") or not name.strip() or not name.isprintable():
            problem = "a stage's name is that of its folder: letters, without '/', and no '.' at its beginning"
            raise ConfigError(source.at(f"training_stages.{name}: {problem}"))
        if len(name.encode()) > _MAX_NAME:
            raise ConfigError(source.at(f"training_stages.{name}: a folder's name has {_MAX_NAME} bytes at most"))
    stages = _sections(source, StageConfig, values, "training_stages")
    for name, stage in stages.items():
        _check_torchacc(source, stage.torchacc, f"training_stages.{name}.torchacc")
        try:
            check_options(stage.optimizer.name, stage.optimizer.options)
        except ConfigError as error:
            raise source.located(error, f"training_stages.{name}") from None
        _check_order(source, stages, name)
    return stages


def _check_order(source: YamlFile, stages: Mapping[str, StageConfig], name: str) -> None:
    """Check that a stage starts from none that starts from it, by way of others or at once."""
    before, passed = stages[name].init_from, [name]
    at = f"training_stages.{name}.init_from = {shown(before)}"
    if before == name:
        raise ConfigError(source.at(f"{at}: a stage cannot start from itself; training.resume lets it go on"))
    while before is not None and before in stages and before not in passed:
        passed.append(before)
        before = stages[before].init_from
    if before == name:
        circle = " from ".join([*passed, name])
        raise ConfigError(source.at(f"{at}: {circle}: none of them could be trained first"))


def _sections(source: YamlFile, cls: type[S], values: Mapping[str, Any], parents: str) -> dict[str, S]:
    return {name: _section(source, cls, value, f"{parents}.{name}") for name, value in values.items()}


def _section(source: YamlFile, cls: type[S], values: Any, at: str) -> S:
    """Make a section of what stands at a place in the file, and put the place into its errors."""
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(source.at(f"{at} = {shown(values)}: expected options by name, as for {cls.__doc__}"))
    try:
        return cls(**values)
    except ConfigError as error:
        raise source.located(error, at, relative_to=cls.path) from None


def _check_torchacc(source: YamlFile, values: Mapping[str, Any], at: str) -> None:
    try:
        Config.from_dict(values)
    except ConfigError as error:
        raise source.located(error, at) from None
    for name in _ELSEWHERE.keys() & values.keys():
        raise ConfigError(
            source.at(f"{at}.{name} = {shown(values[name])}: in a training file this is {_ELSEWHERE[name]}")
        )
    fsdp = (values.get("dist") or {}).get("fsdp") or {}
    for name in StageFSDPConfig.model_fields.keys() & fsdp.keys():
        here = f"distributed.fsdp.{name}"
        raise ConfigError(source.at(f"{at}.dist.fsdp.{name} = {shown(fsdp[name])}: in a training file this is {here}"))


def _check_model(source: YamlFile, name: str, values: Any) -> None:
    """Check that a model config names a family, and only options that the family has, or a pretrained model."""
    if not isinstance(values, dict):
        raise ConfigError(
            source.at(f"{name} = {shown(values)}: expected `model_type: …` and the options of that family")
        )
    if "pretrained" in values:
        if not isinstance(values["pretrained"], str) or len(values) > 1:
            raise ConfigError(
                source.at(f"{name}.pretrained = {shown(values['pretrained'])}: expected a folder or a hub name, alone")
            )
        return
    _check_family(source, name, values)


def _check_family(source: YamlFile, name: str, values: Mapping[str, Any]) -> None:
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if "model_type" not in values:
        raise ConfigError(source.at(f"{name}: model_type is missing; write the family, such as model_type: gpt2"))
    family = values["model_type"]
    if not isinstance(family, str) or family not in CAUSAL or family not in CONFIG_MAPPING:
        kind = "causal language models" if isinstance(family, str) and family in CONFIG_MAPPING else "models"
        hint = did_you_mean(str(family), CAUSAL) or "choose one such as gpt2 or llama"
        raise ConfigError(
            source.at(
                f"{name}.model_type: model_type = {shown(family)} is not a family of {kind} in transformers; {hint}"
            )
        )
    for option, value in values.items():
        if "layer" in option and type(value) is int and value > _MAX_LAYERS:
            raise ConfigError(source.at(f"{name}.{option} = {value}: a model has {_MAX_LAYERS:,} layers at most"))
    for option, hint in unknown_options(values):
        raise ConfigError(source.at(f"{name}.{option} = {shown(values[option])}: {family} has no such option; {hint}"))
    try:
        AutoConfig.for_model(**values)
    except Exception as error:  # transformers has several classes for it
        raise ConfigError(source.at(f"{name}: transformers refuses it: {in_one_line(error)}")) from None
    names = AutoConfig.for_model(family).attribute_map
    for option in ("num_hidden_layers", names.get("num_hidden_layers")):
        if isinstance(values.get(option), int) and values[option] < 1:
            raise ConfigError(source.at(f"{name}.{option} = {values[option]}: a model has at least one layer"))
