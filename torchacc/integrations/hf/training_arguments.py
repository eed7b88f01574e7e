"""transformers' training arguments for a run whose devices are torchacc's: what they mean here, and what is refused."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from transformers.training_args import ParallelMode

from torchacc import dist
from torchacc.config import Config
from torchacc.env import read_job
from torchacc.errors import ConfigError
from torchacc.logging import get_logger

_log = get_logger(__name__)


@dataclass(frozen=True)
class Devices:
    """What the arguments answer about devices, once the model is sharded."""

    device: torch.device
    """Where the batches of this process lie."""
    data_parallel_size: int
    """Devices that see different data, of the whole job."""


class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """The arguments of `transformers.TrainingArguments`; making them starts no device.

    transformers' own ask accelerate for a device as soon as they are made, which under XLA is one device for ever.
    `world_size` is the number of devices that see different data: `per_device_train_batch_size` is that of each.
    """

    distributed_state: Any = SimpleNamespace(distributed_type=DistributedType.NO)

    _devices: Devices | None = None

    @property
    def _setup_devices(self) -> torch.device:
        return self._devices.device if self._devices is not None else torch.device("cpu")

    @property
    def n_gpu(self) -> int:
        """One: a batch size is that of one device."""
        return 1

    @property
    def parallel_mode(self) -> ParallelMode:
        """Not parallel: transformers has no processes to coordinate."""
        return ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """The number of devices that see different data; before the model is sharded, of processes."""
        return self._devices.data_parallel_size if self._devices is not None else read_job().num_processes

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return read_job().rank

    @property
    def local_process_index(self) -> int:
        """This process's rank among those of its machine."""
        return read_job().local_rank

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Context manager that rank 0 runs before the others do. Collective: every process.

        Args:
            local: Whether it is the first process of each machine.
            desc: What is done, for messages.
        """
        is_first = dist.is_master_ordinal(local=local)
        if not is_first:
            dist.rendezvous(desc)
        try:
            yield
        finally:
            if is_first:
                dist.rendezvous(desc)


def adopt(args: Any, config: Config) -> tuple[TrainingArguments, Config]:
    """Return the arguments and the config of a run; those passed are not changed.

    Raises:
        ConfigError: An argument asks for what only transformers' own devices can do, or contradicts the config.
    """
    if not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"args is a {type(args).__module__}.{type(args).__name__}, which has started a device of its own: build it "
            "with torchacc.integrations.hf.TrainingArguments, or, for another trainer, with "
            "torchacc.integrations.hf.arguments_for(SFTConfig) or the like, which takes the same arguments"
        )
    args, config = copy.copy(args), copy.deepcopy(config)
    _refuse(args, config)
    _log_without_effect(args)
    if args.bf16:
        config.compute.bf16 = True
    if args.activation_checkpointing:
        _recompute(args, config)
    if not torch.accelerator.is_available():
        args.dataloader_pin_memory = False  # there is nothing to copy to
    return args, config


def _recompute(args: TrainingArguments, config: Config) -> None:
    """Set recompute in the engine's config in place of the model's, which knows no shards."""
    options = dict(args.activation_checkpointing_kwargs or {})
    options.pop("use_reentrant", None)
    every = options.pop("every_n_layers", None)
    if options:
        raise ConfigError(
            f"activation_checkpointing_kwargs has {', '.join(map(repr, options))}, which torchacc's recompute does not "
            "take: leave it out, and choose by torchacc_config.memory (gc_cls, gc_every, gc_cnt, gc_policy, "
            "offload_activations)"
        )
    config.memory.gc = True
    if every is not None:
        config.memory.gc_every = every
    args.activation_checkpointing = args.gradient_checkpointing = False
    _log.info("activation_checkpointing is carried out as memory.gc of the torchacc_config")


@dataclass(frozen=True)
class _Refused:
    names: tuple[str, ...]
    instead: str
    is_asked: Callable[[Any], bool] = bool


_REFUSED = (
    _Refused(("fsdp", "fsdp_config"), "torchacc shards the model: use torchacc_config.dist.fsdp"),
    _Refused(("deepspeed",), "torchacc shards the model: use torchacc_config.dist.fsdp"),
    _Refused(("parallelism_config",), "the mesh is torchacc's: use torchacc_config.dist"),
    _Refused(("fp16",), "it needs a loss scaler, which this Trainer does not hold: use bf16=True"),
    _Refused(("fp16_full_eval", "bf16_full_eval"), "evaluation computes as training does: use bf16=True for both"),
    _Refused(
        ("torch_compile",),
        "leave it out. Natively torchacc_config.compute.compile = True compiles the model's units; XLA compiles each "
        "step as a whole by itself",
    ),
    _Refused(("use_liger_kernel",), "its kernels replace forwards that torchacc shards: leave it out"),
    _Refused(("auto_find_batch_size",), "a sharded step cannot be tried again: set per_device_train_batch_size"),
    _Refused(("neftune_noise_alpha",), "its noise is drawn outside of the sharded forward: leave it out"),
    _Refused(("enable_jit_checkpoint",), "the processes would save at different steps: use save_steps"),
    _Refused(("save_on_each_node",), "checkpoints lie on a file system that all machines share: leave it out"),
    _Refused(("eval_use_gather_object",), "what is gathered are tensors: leave it out"),
    _Refused(("activation_offloading",), "use torchacc_config.memory.offload_activations"),
    _Refused(
        ("precompute_ref_log_probs",),
        "the model that it would ask is not sharded yet: leave it out, and the reference model is asked in each step",
    ),
    _Refused(("sync_ref_model",), "it mixes weights of two models, which are sharded: leave it out"),
    _Refused(("debug",), "its hooks wait for the device in each module: leave it out"),
    _Refused(
        ("train_sampling_strategy",),
        "torchacc shares the batches out itself: use 'random', 'sequential' or 'group_by_length'",
        lambda value: value == "batch_rebalance",
    ),
    _Refused(
        ("use_cpu",),
        "this machine has an accelerator, which the engine takes: leave it out",
        lambda value: value and torch.accelerator.is_available(),
    ),
    _Refused(
        ("accelerator_config",),
        "torchacc shares the batches out itself: leave it out",
        lambda value: value is not None and any(_changed(value)),
    ),
)


def _changed(accelerator_config: Any) -> list[str]:
    default = type(accelerator_config)()
    values = accelerator_config.to_dict()
    return [name for name, value in default.to_dict().items() if values.get(name, value) != value]


def _refuse(args: TrainingArguments, config: Config) -> None:
    for refused in _REFUSED:
        for name in refused.names:
            value = getattr(args, name, None)
            if refused.is_asked(value):
                raise ConfigError(f"TrainingArguments({name}={value!r}) does not go with torchacc: {refused.instead}")
    if config.compute.fp16:
        raise ConfigError(
            "torchacc_config.compute.fp16 = True needs a loss scaler, which this Trainer does not hold: use "
            "compute.bf16 = True, or bf16=True in the arguments"
        )
    if config.dist.fsdp.flatten_parameters:
        raise ConfigError(
            "torchacc_config.dist.fsdp.flatten_parameters = True leaves one tensor of many, and transformers decides "
            "by name which parameters decay: set it to False"
        )


_WITHOUT_EFFECT = (
    *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
    "ddp_timeout",
)


def _log_without_effect(args: TrainingArguments) -> None:
    defaults = {name: field.default for name, field in type(args).__dataclass_fields__.items()}
    for name in _WITHOUT_EFFECT:
        if name in defaults and getattr(args, name) != defaults[name]:
            _log.info("TrainingArguments.%s has no effect: torchacc has no DistributedDataParallel", name)
