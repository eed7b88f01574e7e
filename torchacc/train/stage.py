"""From a training file and what a command asks for to a `StageRun`: all about a run that can be known before it."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchacc.config import Config
from torchacc.config.yaml_file import YamlFile
from torchacc.env import Job
from torchacc.errors import ConfigError, DataError, shown
from torchacc.train import checks
from torchacc.train.config import (
    DistributedConfig,
    LoggingConfig,
    OptimizerConfig,
    SchedulerConfig,
    StageConfig,
    StageFSDPConfig,
    TextConfig,
    TrainingConfig,
    WandbConfig,
)
from torchacc.train.device_layout import DeviceLayout, make_layout
from torchacc.train.documents import check_text
from torchacc.train.families import MODEL_PREFIX
from torchacc.train.file import TrainFile
from torchacc.train.log_files import check_log_file
from torchacc.train.metric_sinks import check_packages
from torchacc.train.run_folder import CHECKPOINTS, FINAL, is_finished

_PACKING: Mapping[bool | str, str] = {True: ", packed apart", "concat": ", packed", False: ""}
_IDENTIFYING = {"max_steps", "num_epochs", "max_grad_norm", "seed"}
"""Options of the section `training` that have to stay as they are when a run goes on."""
_SECTIONS = {field.alias or name for name, field in StageConfig.model_fields.items()}
"""Of a stage."""
_RESUME: Mapping[str, tuple[bool, None]] = {"auto": (True, None), "never": (False, None)}


@dataclass(frozen=True)
class StageRequest:
    """What a command, or a call, asks for beside the file; None leaves it to the file."""

    stage: str | None = None
    """Name of the stage; the file's first for None."""
    model: str | None = None
    """Name of the model config."""
    preset: str | None = None
    """Name of the preset that stands in for the stage's `distributed` section."""
    num_nodes: int | None = None
    devices: int | None = None
    """Devices of each node; it wins over the file."""
    default_devices: int | None = None
    """Devices of each node where the file says nothing."""
    precision: str | int | None = None


@dataclass(frozen=True)
class StageRun:
    """One run of one stage: resolved, checked and frozen; `str()` is what `--dry-run` prints."""

    stage: str
    """The stage's name."""
    folder: Path
    """The stage's own folder, `<output_dir>/<stage>`."""
    model_name: str
    """Name of the model config."""
    model: Mapping[str, Any]
    """The model config: `model_type` and its options, or `pretrained` alone."""
    init_from: Path | str | None
    """Checkpoint whose weights the run starts from: a folder, or a name on the hub."""
    data: TextConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    training: TrainingConfig
    """With either `max_steps` or `num_epochs`."""
    resumes: bool
    """Whether to go on from a checkpoint where there is one."""
    resume_from: Path | None
    """The checkpoint to go on from; None for the newest complete one of `checkpoints`."""
    layout: DeviceLayout
    """Engine, processes and devices, and the `torchacc.Config` for `accelerate()`."""
    logging: LoggingConfig
    wandb: WandbConfig
    source: Path
    """The training file."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided for the user, and what has no effect: a line each, to log."""
        without_effect = checks.options_without_effect(self.data, self.scheduler, self.training, weights=self.weights)
        return (*self.layout.notes, *without_effect)

    @property
    def weights(self) -> Path | str | None:
        """What the run's weights come from, where they are not new: a folder, or a name on the hub."""
        return self.init_from or self.model.get("pretrained")

    @property
    def config(self) -> Config:
        """The config for `accelerate()`."""
        return self.layout.config

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints that the run goes on from."""
        return self.folder / CHECKPOINTS

    @property
    def final(self) -> Path:
        """Folder of the checkpoint that the finished run leaves, which `from_pretrained()` opens."""
        return self.folder / FINAL

    @property
    def examples_per_step(self) -> int:
        """Examples of all devices in an optimizer step."""
        training = self.training
        return training.batch_size * self.layout.data_parallel_size * training.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all devices in an optimizer step."""
        return self.examples_per_step * self.data.block_size

    def identity(self) -> dict[str, Any]:
        """Return what two runs have in common when one can go on where the other stopped: dotted name -> value.

        Devices, batch sizes and precision are not in it: a run may go on in another layout.
        """
        return {
            "init_from": None if self.init_from is None else str(self.init_from),
            **_dotted(self.model_name, dict(self.model)),
            **_dotted("data", self.data.model_dump(exclude={"num_proc", "cache_dir"})),
            **_dotted("optimizer", self.optimizer.model_dump()),
            **_dotted("scheduler", self.scheduler.model_dump()),
            **_dotted("training", self.training.model_dump(include=_IDENTIFYING)),
        }

    def options(self) -> dict[str, Any]:
        """Return what a run may go on with others of, and is not in `identity()`: dotted name -> value."""
        return {
            **_dotted("training", self.training.model_dump(exclude=_IDENTIFYING)),
            "examples in a step": self.examples_per_step,
            **self.layout.rows(),
        }

    def __str__(self) -> str:
        training, data = self.training, self.data
        options = ", ".join(f"{name} {value}" for name, value in self.model.items() if name != "model_type")
        rows = {
            "stage": f"{self.stage} of {self.source}, written to {self.folder}",
            "model": f"{self.model_name}: {self.model.get('model_type', '')} ({options})",
            "weights": f"new, seed {training.seed}" if self.init_from is None else f"from {self.init_from}",
            "data": f"{data.dataset}, {data.split}, blocks of {data.block_size} tokens{_PACKING[data.packing]}",
            **self.layout.rows(),
            "batch": (
                f"{training.batch_size} x {self.layout.data_parallel_size} devices x "
                f"{training.gradient_accumulation_steps} micro-batches = {self.examples_per_step} examples, "
                f"{self.tokens_per_step:,} tokens, in a step"
            ),
            "optimizer": f"{self.optimizer.name}, {_listed(self.optimizer.options)}",
            "schedule": f"{self.scheduler.name}, {_listed(self.scheduler.model_dump(exclude={'name'}))}",
            "length": f"{training.max_steps} steps" if training.max_steps else f"{training.num_epochs} epochs",
            "checkpoints": _saving(training),
            "resume": training.resume,
        }
        lines = [f"{name:<12}{value}" for name, value in rows.items()]
        return "\n".join([*lines, *(f"note        {note}" for note in self.notes)])


def resolve_stage(file: TrainFile, request: StageRequest | None = None, launched: Job | None = None) -> StageRun:
    """Decide all about a run of a stage, and check what can be checked before it.

    Args:
        file: The training file.
        request: What the command asks for.
        launched: The processes that a launcher has started; None where none has.

    Raises:
        ConfigError: Something is asked for that does not exist, contradicts something else, or cannot be done here; it
            begins with the file and the line, where an option of the file is to blame.
    """
    request = request or StageRequest()
    name, stage = file.stage(request.stage)
    try:
        return _resolve(file, name, stage, request, launched)
    except (ConfigError, DataError) as error:
        raise ConfigError(_located(file.source, name, request, str(error))) from error


def _resolve(file: TrainFile, name: str, stage: StageConfig, request: StageRequest, launched: Job | None) -> StageRun:
    distributed = _distributed(file, stage, request)
    model_name, model = _model(file, name, stage, request)
    training, resumes, resume_from = _training(stage)
    check_text(stage.data)
    checks.check_length(stage)
    checks.check_stopping(stage)
    init_from = _init_from(file, stage, model_name, model)
    checks.check_model(stage.data, model_name, model, init_from or model.get("pretrained"))
    layout = make_layout(distributed, stage.torchacc, precision=request.precision, launched=launched)
    checks.check_kernel(stage.data, layout.config.compute.attention)
    folder = file.output_dir / name
    checks.check_writable(folder)
    check_packages(file.logging, file.wandb)
    check_log_file(folder, file.logging)
    if launched is None or launched.rank == 0:
        checks.check_hub_answers(stage.data, model_name, model, init_from)
    sections: dict[str, Any] = {
        "data": deepcopy(stage.data),
        "optimizer": deepcopy(stage.optimizer),
        "scheduler": deepcopy(stage.scheduler),
        "training": training,
        "logging": deepcopy(file.logging),
        "wandb": deepcopy(file.wandb),
    }
    for section in sections.values():
        section.freeze()
    return StageRun(
        stage=name,
        folder=folder,
        model_name=model_name,
        model=dict(model),
        init_from=init_from,
        resumes=resumes,
        resume_from=resume_from,
        layout=layout,
        source=file.path,
        **sections,
    )


def _located(source: YamlFile, stage: str, request: StageRequest, message: str) -> str:
    """Return a message with the file, the line and the place of the option that it begins with; as it is without one.

    An option that the file leaves out has the line of the section that it would stand in; but for devices and machines,
    which may be the command's.
    """
    option = message.partition(" ")[0].rstrip(":")
    place = _place(option.removeprefix("config."), stage, request)
    if place in source.lines:
        return source.at(f"{place}{message.removeprefix(option)}")
    section = option.partition(".")[0]
    if place is None or section not in _SECTIONS - {"distributed"}:
        return message
    while place and place not in source.lines:
        place = place.rpartition(".")[0]
    return source.at(f"{place}: {message}")


def _place(option: str, stage: str, request: StageRequest) -> str | None:
    """Return where an option would stand in the file; None for what the command says."""
    section, _, name = option.rpartition(".")
    said = {"distributed.devices": request.devices, "distributed.num_nodes": request.num_nodes}.get(option)
    if said is not None or (section == "compute" and request.precision is not None):
        return None
    at = f"training_stages.{stage}"
    distributed = f"{at}.distributed" if request.preset is None else f"distributed_examples.{request.preset}"
    if option == "backend":
        return f"{distributed}.engine"
    if section == "dist.fsdp" and name in StageFSDPConfig.model_fields:
        return f"{distributed}.fsdp.{name}"
    if option.startswith("distributed."):
        return f"{distributed}.{option.removeprefix('distributed.')}"
    if option.startswith((MODEL_PREFIX, "logging.", "wandb.")):
        return option
    return f"{at}.{option}" if option.partition(".")[0] in _SECTIONS else f"{at}.torchacc.{option}"


def _distributed(file: TrainFile, stage: StageConfig, request: StageRequest) -> DistributedConfig:
    chosen = deepcopy(stage.distributed if request.preset is None else file.preset(request.preset))
    if request.default_devices is not None and "devices" not in chosen.model_fields_set:
        chosen.devices = request.default_devices
    if request.devices is not None:
        chosen.devices = request.devices
    if request.num_nodes is not None:
        chosen.num_nodes = request.num_nodes
    return chosen


def _model(file: TrainFile, name: str, stage: StageConfig, request: StageRequest) -> tuple[str, Mapping[str, Any]]:
    chosen = stage.model if request.model is None else request.model
    if chosen is None and len(file.models) == 1:
        chosen = next(iter(file.models))
    if chosen is None:
        raise ConfigError(
            f"{file.path}: stage {shown(name)} names no model: write model_config: … there, or choose one with "
            f"--model-config; the file has {', '.join(file.models) or 'no section model_config_…'}"
        )
    full, model = file.model(chosen)
    if "pretrained" in model:
        checks.check_pretrained(f"{full}.pretrained = {shown(model['pretrained'])}", model["pretrained"])
    return full, model


def _training(stage: StageConfig) -> tuple[TrainingConfig, bool, Path | None]:
    """Return the section with a length, whether the run resumes, and from which checkpoint."""
    training = deepcopy(stage.training)
    if training.max_steps is None and training.num_epochs is None:
        training.num_epochs = 1
    if training.resume in _RESUME:
        return training, *_RESUME[training.resume]
    return training, True, checks.check_resumable(f"training.resume = {shown(training.resume)}", training.resume)


def _init_from(file: TrainFile, stage: StageConfig, model_name: str, model: Mapping[str, Any]) -> Path | str | None:
    given, option = stage.init_from, f"init_from = {shown(stage.init_from)}"
    if given is None:
        return None
    if "pretrained" in model:
        raise ConfigError(f"{option}: and {model_name} is pretrained, so that there are two sets of weights; keep one")
    if given in file.stages:
        checks.check_finished(option, given, file.output_dir / given)
        return file.output_dir / given / FINAL
    folder = Path(given).expanduser()
    if given and is_finished(folder):
        given = str(folder / FINAL)
    return checks.checkpoint_name(option, given, file.stages)


def _dotted(parent: str, values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{parent}.{name}"
        flat.update(_dotted(path, value) if isinstance(value, Mapping) else {path: value})
    return flat


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _saving(training: TrainingConfig) -> str:
    every = f"every {training.save_every_steps} steps" if training.save_every_steps else "at the end"
    kept = f"newest {training.keep_checkpoints} kept" if training.keep_checkpoints else "all kept"
    return f"{every}, {kept}{', written in the background' * training.async_save}"
