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
    """The text to evaluate on: set one of the two options."""

    path = "data.validation"

    split: Name | None = None
    """Another split of the same dataset."""
    files: Paths | None = None
    """Files of the same kind as the dataset's: a path, a glob, or a list of them."""


class TextConfig(Section):
    """The text to train on, and how to tokenize it."""

    path = "data"

    dataset: Name = "stdlib"
    """`stdlib` for the sources of Python's standard library (no download), `text`, `json` or `parquet` for your own
    files, or the name of a dataset on the hub, or its folder."""
    name: Name | None = None
    """Configuration of a dataset that has more than one."""
    files: Paths | None = None
    """Files for `text`, `json` and `parquet`: a path, a glob, or a list of them; relative to the working directory."""
    split: Name = "train"
    """Split to train on."""
    validation: ValidationConfig | None = None
    """What to evaluate on; None for a share of the documents, which is held out of training."""
    validation_share: BelowOne = 0.05
    """The share of the documents to hold out, from 0 (no evaluation) to below 1."""
    text_column: Name = "text"
    """Column that holds the text."""
    tokenizer: Name | None = None
    """Folder or hub name of a tokenizer; None to train a byte-level BPE on the text."""
    vocab_size: Annotated[int, Field(strict=True, ge=257), Bits64] = 4096
    """Vocabulary size of a tokenizer that is trained here: 256 bytes and at least one more token."""
    block_size: Annotated[int, Field(strict=True, ge=2), Bits64] = 128
    """Number of tokens in an example."""
    packing: StrictBool | Literal["concat"] = True
    """Fill each block with documents, or parts of them, that do not attend to one another; `concat` to let them attend,
    as in GPT-2's training; False for one document in each block, padded."""
    streaming: StrictBool = False
    """Read and tokenize text during training instead of before it; `training.max_steps` sets the length of the run."""
    shuffle: StrictBool = True
    """Shuffle the data anew for each epoch."""
    num_proc: Count | None = None
    """Number of processes that tokenize; None to tokenize in this one."""
    cache_dir: Name | None = None
    """Folder for tokenized text; None for `torchacc/text` in `$XDG_CACHE_HOME`, or in `~/.cache`."""


class OptimizerConfig(Section):
    """A class of `torch.optim` and its arguments; any argument of that class can be set here."""

    path = "optimizer"
    model_config = ConfigDict(extra="allow")

    name: StrictStr = "adamw"
    """The class, in upper or lower case: adamw, adam, sgd, adafactor …"""
    lr: Positive = 1e-3
    """Base learning rate of the schedule."""

    @property
    def options(self) -> dict[str, Any]:
        """All arguments of the class, `lr` included; lists, as YAML has them, are tuples."""
        given = {"lr": self.lr, **(self.model_extra or {})}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


class SchedulerConfig(Section):
    """The learning rate over the steps, relative to `optimizer.lr`."""

    path = "scheduler"

    name: Schedule = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_steps: Natural = 0
    """Number of optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.1
    """Final learning rate, as a share of `optimizer.lr`."""


class EarlyStoppingConfig(Section):
    """Stop when the validation loss no longer falls."""

    path = "training.early_stopping"

    patience: Count = 3
    """Number of consecutive evaluations without an improvement before the run stops."""
    min_delta: NotNegative = 0.0
    """Minimum decrease of the loss that counts as an improvement."""


class TrainingConfig(Section):
    """The training loop: its length, batches, logs, evaluations and checkpoints."""

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
    """Number of examples in a micro-batch of one device."""
    gradient_accumulation_steps: Count = 1
    """Number of micro-batches of each device in an optimizer step."""
    max_steps: Count | None = None
    """Number of optimizer steps of the run."""
    num_epochs: Count | None = None
    """Number of passes over the data, instead of `max_steps`; 1 if neither is set."""
    max_grad_norm: Positive | None = 1.0
    """Maximum norm of the gradients, to which they are clipped; None not to clip."""
    seed: Seed = 0
    """Seed of the weights, of the order of the data, and of dropout."""
    log_every_steps: Count = 10
    """Optimizer steps between two log lines."""
    eval_every_steps: Count | None = None
    """Optimizer steps between two evaluations; None to evaluate at the end only."""
    eval_steps: Count | None = None
    """Number of batches in an evaluation; None for all."""
    save_every_steps: Count | None = 50
    """Optimizer steps between two checkpoints; None to save at the end, and at SIGTERM."""
    keep_checkpoints: Count | None = 2
    """Number of checkpoints to keep, the newest ones; None to keep all."""
    async_save: StrictBool = True
    """Write checkpoints in the background."""
    resume: StrictStr = "auto"
    """`auto` to resume from the newest complete checkpoint of this run, `never` to start at step 0, or the folder of a
    checkpoint to resume from."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop before the last step if the validation loss no longer falls; None to never stop early."""


class StageFSDPConfig(Section):
    """How to shard; the options of `dist.fsdp` in `torchacc.Config`."""

    path = "distributed.fsdp"
    elsewhere = {
        "size": "distributed.devices, the devices of each machine",
        "wrap_layer_cls": "torchacc.dist.fsdp.wrap_layer_cls",
    }

    enabled: StrictBool = True
    """Whether the strategy `auto` shards the model; otherwise every device holds all of it."""
    cpu_offload: StrictBool = False
    """Keep the shards in host memory, and run the optimizer there (native engine only)."""
    sharding_strategy: ShardingStrategy = "FULL_SHARD"
    """FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, or HYBRID_SHARD, which shards within nodes and replicates across nodes."""
    backward_prefetch: BackwardPrefetch = "BACKWARD_PRE"
    """When the backward pass gathers the next unit."""
    forward_prefetch: StrictBool = False
    """Gather the next unit before the current one's forward pass."""
    limit_all_gathers: StrictBool = True
    """Keep at most two gathered units in memory."""
    activation_checkpointing: StrictBool = False
    """Recompute activations in the backward pass instead of keeping them."""
    use_orig_params: StrictBool = True
    """Give the optimizer the model's own parameters."""


class DistributedConfig(Section):
    """The number of devices, and how the model is sharded over them."""

    path = "distributed"
    elsewhere = {axis: f"torchacc.dist.{axis}.size" for axis in get_args(Axis)}

    strategy: Literal["auto", "fsdp", "ddp"] = "auto"
    """`fsdp` shards the model, `ddp` replicates it, and `auto` shards it if `fsdp.enabled` is true."""
    num_nodes: Count = 1
    """Number of machines."""
    devices: Count | Literal["auto"] = "auto"
    """Number of devices of each machine; `auto` for the number of processes that a launcher has started, or else of
    this machine's accelerators, or else 1."""
    sync_batchnorm: StrictBool = False
    """Compute the statistics of BatchNorm over the batch of all devices."""
    engine: Backend = "auto"
    """The engine; the option `backend` of `torchacc.Config`."""
    fsdp: StageFSDPConfig = Field(default_factory=StageFSDPConfig)
    """How to shard."""


class StageConfig(Section):
    """One stage: `training_stages.<name>`."""

    elsewhere = TrainingConfig.elsewhere

    model: Name | None = Field(default=None, alias="model_config")
    """Name of the top-level section `model_config_…` that describes the model; the command's `--model-config` wins."""
    init_from: StrictStr | None = None
    """Initial weights: the name of an earlier stage, or the folder or hub name of a checkpoint; None for new ones."""
    data: TextConfig = Field(default_factory=TextConfig)
    """The text to train on."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The optimizer."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """The learning rate's schedule."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """The loop."""
    distributed: DistributedConfig = Field(default_factory=DistributedConfig)
    """Devices and sharding; a preset of `distributed_examples` can replace it."""
    torchacc: dict[StrictStr, Any] = Field(default_factory=dict)
    """Other options of `torchacc.Config`, such as `{compute: {scan_layers: true}}`."""


class LoggingConfig(Section):
    """What to write in addition to the metrics."""

    path = "logging"

    debug: StrictBool = False
    """Log details, and write the log of each rank to its own file."""
    log_file: Name | None = None
    """Path of the log file, absolute or relative to the stage's folder."""
    tensorboard: StrictBool = False
    """Write event files for TensorBoard."""


class WandbConfig(Section):
    """Weights & Biases."""

    path = "wandb"

    use_wandb: StrictBool = False
    """Whether to report to Weights & Biases; the environment variable WANDB_MODE can make it offline."""
    project: Name | None = None
    """The project."""
    tags: list[StrictStr] = []
    """Tags of the run."""


class TopConfig(Section):
    """The top level of a file, in addition to its `model_config_…` sections."""

    output_dir: Name = "runs"
    """Folder for the folders of the stages, relative to the working directory."""
    training_stages: dict[StrictStr, Any] = {}
    """The stages, by name."""
    distributed_examples: dict[StrictStr, Any] = {}
    """Presets: `distributed` sections by name."""
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """What to write in addition to the metrics."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""
