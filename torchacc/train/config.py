"""The sections of a training file: what `training_stages.<stage>` and its neighbours may say.

Paths in messages are relative to the stage; `torchacc.train.file` puts the rest, the file and the line before them.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, StrictStr

from torchacc.config.option_types import Axis, BackwardPrefetch, Bits64, Count, Natural, ShardingStrategy
from torchacc.config.root import Backend
from torchacc.config.sections import Section

Name = Annotated[StrictStr, Field(min_length=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63)]  # ranks are added to it, and 2**64 is the end
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
Schedule = Literal["cosine", "linear", "constant"]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Paths = Annotated[list[StrictStr], Field(min_length=1), BeforeValidator(_as_list)]


class ValidationConfig(Section):
    """Where the text to evaluate on comes from; one of the two."""

    path = "data.validation"

    split: Name | None = None
    """Another split of the same dataset."""
    files: Paths | None = None
    """Files of the same kind as the dataset's: a path, a glob, or a list of them."""


class TextConfig(Section):
    """The text to train on, and how it becomes tokens."""

    path = "data"

    dataset: Name = "stdlib"
    """`stdlib` (the sources of Python's standard library: no download), `text`, `json` or `parquet` for files of one's
    own, or a dataset's name on the hub or its folder."""
    name: Name | None = None
    """Configuration of a dataset that has several."""
    files: Paths | None = None
    """Files for `text`, `json` and `parquet`: a path, a glob, or a list of them; relative to the working directory."""
    split: Name = "train"
    """Split to train on."""
    validation: ValidationConfig | None = None
    """What to evaluate on; None for a share of the documents, held out of training."""
    validation_share: BelowOne = 0.05
    """That share, from 0 (no evaluation) to below 1."""
    text_column: Name = "text"
    """Column that holds the text."""
    tokenizer: Name | None = None
    """Folder or hub name of a tokenizer; None to train a byte-level BPE on the text."""
    vocab_size: Annotated[int, Field(strict=True, ge=257), Bits64] = 4096
    """Tokens of a tokenizer that is trained here: its 256 bytes and at least one more."""
    block_size: Annotated[int, Field(strict=True, ge=2), Bits64] = 128
    """Tokens in an example."""
    packing: StrictBool | Literal["concat"] = True
    """Fill each block with documents and parts of them, which do not see one another; `concat` to let them, as GPT-2's
    training did; False for blocks of one document, padded."""
    streaming: StrictBool = False
    """Read while training, instead of everything first; `training.max_steps` then says how long."""
    shuffle: StrictBool = True
    """Draw a new order for each epoch."""
    num_proc: Count | None = None
    """Processes that tokenize; None for this one."""
    cache_dir: Name | None = None
    """Folder for what is tokenized; None for `torchacc/text` in `$XDG_CACHE_HOME`, or in `~/.cache`."""


class OptimizerConfig(Section):
    """A class of `torch.optim`, and its arguments: any of that class can stand here."""

    path = "optimizer"
    model_config = ConfigDict(extra="allow")

    name: StrictStr = "adamw"
    """The class, in upper or lower case: adamw, adam, sgd, adafactor …"""
    lr: Positive = 1e-3
    """The learning rate that the schedule starts from."""

    @property
    def options(self) -> dict[str, Any]:
        """All arguments of the class, `lr` included; lists, as YAML has them, are tuples."""
        given = {"lr": self.lr, **(self.model_extra or {})}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


class SchedulerConfig(Section):
    """The learning rate over the steps, relative to `optimizer.lr`."""

    path = "scheduler"

    name: Schedule = "cosine"
    """How it falls after the warm-up."""
    warmup_steps: Natural = 0
    """Optimizer steps over which it rises from 0."""
    min_lr_ratio: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.1
    """What it falls to, as a share of `optimizer.lr`."""


class EarlyStoppingConfig(Section):
    """Stop when the validation loss no longer falls."""

    path = "training.early_stopping"

    patience: Count = 3
    """Evaluations in a row that may pass without an improvement."""
    min_delta: NotNegative = 0.0
    """By how much the loss must fall to count as one."""


class TrainingConfig(Section):
    """The loop: how long, in what batches, and what happens on the way."""

    path = "training"
    elsewhere = {
        "betas": "optimizer.betas",
        "bf16": "torchacc.compute.bf16",
        "block_size": "data.block_size",
        "epochs": "training.num_epochs",
        "fp16": "torchacc.compute.fp16",
        "grad_accum": "training.gradient_accumulation_steps",
        "gradient_checkpointing": "torchacc.memory.gc",
        "learning_rate": "optimizer.lr",
        "logging_steps": "training.log_every_steps",
        "lr_scheduler_type": "scheduler.name",
        "max_length": "data.block_size",
        "num_train_epochs": "training.num_epochs",
        "optim": "optimizer.name",
        "mixed_precision": "torchacc.compute.bf16",
        "output_dir": "output_dir, at the top of the file",
        "per_device_train_batch_size": "training.batch_size",
        "precision": "torchacc.compute.bf16",
        "resume_from_checkpoint": "training.resume",
        "save_steps": "training.save_every_steps",
        "save_total_limit": "training.keep_checkpoints",
        "seq_length": "data.block_size",
        "warmup_steps": "scheduler.warmup_steps",
        "weight_decay": "optimizer.weight_decay",
    }

    batch_size: Count = 2
    """Examples in a micro-batch of one device."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches of each device in an optimizer step."""
    max_steps: Count | None = None
    """Optimizer steps of the run."""
    num_epochs: Count | None = None
    """Passes over the data instead of `max_steps`; 1 where neither is given."""
    max_grad_norm: Positive | None = 1.0
    """Norm that gradients are clipped to; None not to clip."""
    seed: Seed = 0
    """Seed of the weights, of the order of the data, and of dropout."""
    log_every_steps: Count = 10
    """Optimizer steps between two log lines."""
    eval_every_steps: Count | None = None
    """Optimizer steps between two evaluations; None to evaluate at the end only."""
    eval_steps: Count | None = None
    """Batches of an evaluation; None for all."""
    save_every_steps: Count | None = 50
    """Optimizer steps between two checkpoints; None to save at the end, and at SIGTERM."""
    keep_checkpoints: Count | None = 2
    """How many of the newest checkpoints to keep; None for all."""
    async_save: StrictBool = True
    """Write checkpoints in the background."""
    resume: StrictStr = "auto"
    """`auto` to go on from the newest complete checkpoint of this run, `never` to start at step 0, or the folder of a
    checkpoint to go on from."""
    early_stopping: EarlyStoppingConfig | None = None
    """When to stop before the last step; None for never."""


class StageFSDPConfig(Section):
    """What is sharded, and how; as `torchacc.Config`'s `dist.fsdp`."""

    path = "distributed.fsdp"
    elsewhere = {
        "size": "distributed.devices, the devices of each machine",
        "wrap_layer_cls": "torchacc.dist.fsdp.wrap_layer_cls",
    }

    enabled: StrictBool = True
    """Whether strategy `auto` shards; without it every device holds the full model."""
    cpu_offload: StrictBool = False
    """Keep the shards in the host's memory, and step there; only the native engine can."""
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, or HYBRID_SHARD: sharded inside of each node, replicated across nodes."""
    backward_prefetch: BackwardPrefetch = "BACKWARD_PRE"
    """When the backward pass gathers the next unit."""
    forward_prefetch: StrictBool = False
    """Gather the next unit before the current one's forward pass."""
    limit_all_gathers: StrictBool = True
    """Let no more than two gathered units wait in memory."""
    activation_checkpointing: StrictBool = False
    """Compute activations again in the backward pass instead of keeping them."""
    use_orig_params: StrictBool = True
    """Let the optimizer see the model's own parameters."""


class DistributedConfig(Section):
    """Devices, and how the model lies on them."""

    path = "distributed"
    elsewhere = {axis: f"torchacc.dist.{axis}.size" for axis in get_args(Axis)}

    strategy: Literal["auto", "fsdp", "ddp"] = "auto"
    """`fsdp` shards, `ddp` replicates, `auto` does as `fsdp.enabled` says."""
    num_nodes: Count = 1
    """Machines."""
    devices: Count | Literal["auto"] = "auto"
    """Devices of each machine; `auto` for the processes that a launcher has started, else this machine's accelerators,
    else 1."""
    sync_batchnorm: StrictBool = False
    """Let BatchNorm see the batch of all devices."""
    engine: Backend = "auto"
    """Who carries it out; as `torchacc.Config`'s `backend`."""
    fsdp: StageFSDPConfig = Field(default_factory=StageFSDPConfig)
    """What is sharded, and how."""


class StageConfig(Section):
    """One stage: `training_stages.<name>`."""

    elsewhere = TrainingConfig.elsewhere

    model: Name | None = Field(default=None, alias="model_config")
    """Name of the top-level section `model_config_…` that describes the model; the command's `--model-config` wins."""
    init_from: StrictStr | None = None
    """Where the weights come from: an earlier stage's name, or a checkpoint's folder or hub name; None for new ones."""
    data: TextConfig = Field(default_factory=TextConfig)
    """The text."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """The learning rate's schedule."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """The loop."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Devices and sharding; a preset of `distributed_examples` can replace it."""
    torchacc: dict[StrictStr, Any] = Field(default_factory=dict)
    """Any further options of `torchacc.Config`, such as `{compute: {scan_layers: true}}`."""


class LoggingConfig(Section):
    """What is written down beside the metrics."""

    path = "logging"

    debug: StrictBool = False
    """Log details, and each rank's to a file of its own."""
    log_file: Name | None = None
    """File for the log, in the stage's folder unless it is absolute."""
    tensorboard: StrictBool = False
    """Write TensorBoard's event files as well."""


class WandbConfig(Section):
    """Weights & Biases."""

    path = "wandb"

    use_wandb: StrictBool = False
    """Whether to report there; offline where WANDB_MODE says so."""
    project: Name | None = None
    """The project."""
    tags: list[StrictStr] = []
    """Tags of the run."""


class TopConfig(Section):
    """The top level of a file, beside its `model_config_…` sections."""

    output_dir: Name = "runs"
    """Folder of the stages' folders; relative to the working directory."""
    training_stages: dict[StrictStr, Any] = {}
    """The stages, by name."""
    distributed_examples: dict[StrictStr, Any] = {}
    """Presets: `distributed` sections by name."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """What is written down beside the metrics."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""
