"""From a training file and a command's wishes to a `StageRun`: everything about a run that can be known before it."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchacc.config import Config
from torchacc.errors import ConfigError, shown
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
from torchacc.train.documents import NO_DATASETS
from torchacc.train.file import TrainFile
from torchacc.train.folder import is_finished
from torchacc.train.hub import check_hub, is_on_hub
from torchacc.train.idle import idle_options
from torchacc.train.layout import Launch, Layout, make_layout
from torchacc.train.log_files import check_log_file
from torchacc.train.trackers import check_packages

FINAL = "final"
"""Folder, in a stage's folder, of the checkpoint that a finished run leaves."""
CHECKPOINTS = "checkpoints"
"""Folder, in a stage's folder, of the checkpoints that a run goes on from."""

_PACKING: Mapping[bool | str, str] = {True: ", packed apart", "concat": ", packed", False: ""}
_RESUME: Mapping[str, tuple[bool, None]] = {"auto": (True, None), "never": (False, None)}


@dataclass(frozen=True)
class Wishes:
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
    """The checkpoint to go on from; None for the newest whole one of `checkpoints`."""
    layout: Layout
    """Engine, processes and devices, and the `torchacc.Config` for `accelerate()`."""
    logging: LoggingConfig
    wandb: WandbConfig
    source: Path
    """The training file."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided for the user, and what has no effect: a line each, to log."""
        weights = self.init_from or self.model.get("pretrained")
        idle = idle_options(self.data, self.scheduler, self.training, weights=weights)
        return (*self.layout.notes, *idle)

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
        return training.batch_size * self.layout.num_data_shards * training.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all devices in an optimizer step."""
        return self.examples_per_step * self.data.block_size

    def identity(self) -> dict[str, Any]:
        """Return what two runs have in common when one can go on where the other stopped: dotted name -> value.

        Devices, batch sizes and precision are not in it: a run may go on in another layout.
        """
        training = self.training.model_dump(include={"max_steps", "num_epochs", "max_grad_norm", "seed"})
        return {
            "init_from": None if self.init_from is None else str(self.init_from),
            **_dotted(self.model_name, dict(self.model)),
            **_dotted("data", self.data.model_dump(exclude={"num_proc", "cache_dir"})),
            **_dotted("optimizer", self.optimizer.model_dump()),
            **_dotted("scheduler", self.scheduler.model_dump()),
            **_dotted("training", training),
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
                f"{training.batch_size} x {self.layout.num_data_shards} devices x "
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


def resolve_stage(file: TrainFile, wishes: Wishes, launch: Launch) -> StageRun:
    """Decide all about a run of a stage, and check what can be checked before it.

    Args:
        file: The training file.
        wishes: What the command asks for.
        launch: Who starts the processes.

    Raises:
        ConfigError: Something is asked for that does not exist, contradicts something else, or cannot be done here.
    """
    name, stage = file.stage(wishes.stage)
    at = f"training_stages.{name}"
    distributed = _distributed(file, stage, wishes)
    model_name, model = _model(file, name, stage, wishes)
    training, resumes, resume_from = _training(file, at, stage)
    checks.check_data(file.source, f"{at}.data", stage.data)
    checks.check_length(file.source, at, stage)
    checks.check_stopping(file.source, at, stage)
    init_from = _init_from(file, name, stage, model_name, model)
    checks.check_model(file.source, at, stage.data, model_name, model, init_from or model.get("pretrained"))
    layout = _layout(file, name, stage, distributed, wishes, launch)
    folder = file.output_dir / name
    checks.check_writable(folder)
    _check_logging(file, folder)
    if launch.job.rank == 0:
        _check_hub(file, at, stage, model_name, model, init_from)
    run = StageRun(
        stage=name,
        folder=folder,
        model_name=model_name,
        model=dict(model),
        init_from=init_from,
        data=deepcopy(stage.data),
        optimizer=deepcopy(stage.optimizer),
        scheduler=deepcopy(stage.scheduler),
        training=training,
        resumes=resumes,
        resume_from=resume_from,
        layout=layout,
        logging=deepcopy(file.logging),
        wandb=deepcopy(file.wandb),
        source=file.path,
    )
    for section in (run.data, run.optimizer, run.scheduler, run.training, run.logging, run.wandb):
        section.freeze()
    return run


def _distributed(file: TrainFile, stage: StageConfig, wishes: Wishes) -> DistributedConfig:
    chosen = deepcopy(stage.distributed if wishes.preset is None else file.preset(wishes.preset))
    if wishes.default_devices is not None and "devices" not in chosen.model_fields_set:
        chosen.devices = wishes.default_devices
    if wishes.devices is not None:
        chosen.devices = wishes.devices
    if wishes.num_nodes is not None:
        chosen.num_nodes = wishes.num_nodes
    return chosen


def _layout(
    file: TrainFile, name: str, stage: StageConfig, distributed: DistributedConfig, wishes: Wishes, launch: Launch
) -> Layout:
    try:
        return make_layout(distributed, stage.torchacc, precision=wishes.precision, launch=launch)
    except ConfigError as error:
        option, _, rest = str(error).partition(" ")
        place = _place(option.rstrip(":").removeprefix("config."), name, wishes)
        if place not in file.source.lines:
            raise
        raise ConfigError(file.source.at(f"{place}{':' * option.endswith(':')} {rest}")) from None


def _place(option: str, stage: str, wishes: Wishes) -> str | None:
    """Return where an option of the layout stands in the file, if it stands there; None for what the command says."""
    section, _, name = option.rpartition(".")
    if (option == "distributed.devices" and wishes.devices) or (section == "compute" and wishes.precision is not None):
        return None
    at = f"training_stages.{stage}"
    distributed = f"{at}.distributed" if wishes.preset is None else f"distributed_examples.{wishes.preset}"
    if option == "backend":
        return f"{distributed}.engine"
    if section == "dist.fsdp" and name in StageFSDPConfig.model_fields:
        return f"{distributed}.fsdp.{name}"
    if option.startswith("distributed."):
        return f"{distributed}.{option.removeprefix('distributed.')}"
    return f"{at}.torchacc.{option}"


def _model(file: TrainFile, name: str, stage: StageConfig, wishes: Wishes) -> tuple[str, Mapping[str, Any]]:
    chosen = stage.model if wishes.model is None else wishes.model
    if chosen is None and len(file.models) == 1:
        chosen = next(iter(file.models))
    if chosen is None:
        raise ConfigError(
            f"{file.path}: stage {shown(name)} names no model: write model_config: … there, or choose one with "
            f"--model-config; the file has {', '.join(file.models) or 'no section model_config_…'}"
        )
    full, model = file.model(chosen)
    if "pretrained" in model:
        given = model["pretrained"]
        checks.check_pretrained(file.source, f"{full}.pretrained = {shown(given)}", given)
    return full, model


def _training(file: TrainFile, at: str, stage: StageConfig) -> tuple[TrainingConfig, bool, Path | None]:
    """Return the section with a length, whether the run resumes, and from which checkpoint."""
    training = deepcopy(stage.training)
    if training.max_steps is None and training.num_epochs is None:
        training.num_epochs = 1
    if training.resume in _RESUME:
        return training, *_RESUME[training.resume]
    folder = Path(training.resume).expanduser()
    at = f"{at}.training.resume = {shown(training.resume)}"
    if not training.resume or not folder.is_dir():
        raise ConfigError(
            file.source.at(f"{at}: there is no such folder; write 'auto', 'never', or a checkpoint's folder")
        )
    checks.check_resumable(file.source, at, folder)
    return training, True, folder


def _init_from(
    file: TrainFile, name: str, stage: StageConfig, model_name: str, model: Mapping[str, Any]
) -> Path | str | None:
    given, at = stage.init_from, f"training_stages.{name}.init_from = {shown(stage.init_from)}"
    if given is None:
        return None
    if "pretrained" in model:
        raise ConfigError(
            file.source.at(f"{at}: and {model_name} is pretrained, so that there are two sets of weights; keep one")
        )
    if given in file.stages:
        checks.check_finished(file.source, at, given, file.output_dir / given)
        return file.output_dir / given / FINAL
    folder = Path(given).expanduser()
    if given and is_finished(folder):
        given = str(folder / FINAL)
    return checks.checkpoint_name(file.source, at, given, file.stages)


def _check_hub(
    file: TrainFile,
    at: str,
    stage: StageConfig,
    model_name: str,
    model: Mapping[str, Any],
    init_from: Path | str | None,
) -> None:
    """Check that the hub answers, where anything is to come from it."""
    dataset = stage.data.dataset
    given = {
        f"{model_name}.pretrained": model.get("pretrained"),
        f"{at}.init_from": init_from,
        f"{at}.data.tokenizer": stage.data.tokenizer,
        f"{at}.data.dataset": None if dataset in NO_DATASETS else dataset,
    }
    asked = [(option, name) for option, name in given.items() if isinstance(name, str) and is_on_hub(name)]
    try:
        for option, name in asked[:1]:  # the others ask the same hub
            check_hub(option, name)
    except ConfigError as error:
        raise ConfigError(file.source.at(str(error))) from None


def _check_logging(file: TrainFile, folder: Path) -> None:
    try:
        check_packages(file.logging, file.wandb)
        check_log_file(folder, file.logging)
    except ConfigError as error:
        raise ConfigError(file.source.at(str(error))) from None


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
