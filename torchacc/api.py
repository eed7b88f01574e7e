"""The functions that a training script calls."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchacc import arguments, data
from torchacc.attach import attach, replaced_parameters_refused
from torchacc.checkpoint import model_state, optimizer_state
from torchacc.checkpoint.model_state import FullStateDictConfig, StateDictType
from torchacc.config import Config
from torchacc.engines import deferred, registry
from torchacc.engines.base import Engine
from torchacc.engines.compile_report import CompileReport
from torchacc.engines.first_steps import note_batch
from torchacc.engines.initial_values import align_replicas, log_kept_dtypes, materialise_buffers
from torchacc.engines.sharded_model import HANDLE, sharded_model
from torchacc.engines.uncaught_errors import install_excepthook
from torchacc.env import read_job
from torchacc.errors import ConfigError
from torchacc.launch import progress
from torchacc.logging import get_logger, start_logging
from torchacc.parallel.plan import make_plan

_log = get_logger(__name__)


def accelerate(
    model: nn.Module,
    dataloader: Iterable[Any] | None = None,
    config: Config | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Shard a model, and its data, over the devices of the job. Collective: call it on every process.

    The model is changed in place. It remains an instance of its class, with the same attributes, `config` and parameter
    names, and gains the method `clip_grad_norm_(max_norm)`. Any scalar that its forward returns, such as the loss, is
    the mean over all devices.

    Args:
        model: The model, on the CPU. If it differs between processes, all of them use the model of rank 0. A model on
            the meta device takes memory for its shards only; load its weights with `torchacc.checkpoint.load()`. So
            does a model from `deferred_init()`, which starts from its own initialisation.
        dataloader: A DataLoader, or any iterable of batches. Its `batch_size` is the batch size of one device. The
            returned loader yields this process's part of each global batch, on the device.
        config: How to shard the model; None for data parallelism over all processes. It is not modified.
        optimizer: An optimizer that was created before this call; None if it is created afterwards.

    Returns:
        The model; `(model, loader)` if a dataloader is passed; with the optimizer last if one is passed.

    Raises:
        ConfigError: The config contradicts itself, the model or the job.
        DataError: The dataloader cannot be sharded.
        EngineError: The devices cannot be started.
    """
    arguments.check(model, dataloader, config, optimizer)
    job = read_job()
    start_logging(job.rank)
    if job.launched:
        install_excepthook(job.local_rank)
    engine = registry.make_engine(config if config is not None else Config(), job)
    _refuse_second_time(model)
    if isinstance(model, nn.Module):
        arguments.refuse_wrapped(model)
    plan = make_plan(model, engine.config, engine.mesh)
    arguments.check_gradients(model)
    engine.check(model)
    deferred.check_unchanged(model)
    _refuse_optimizer_of_others(model, optimizer)
    engine.check_optimizer(optimizer)
    _list_options_without_effect(engine)

    progress.start()
    registry.activate(engine, plan)
    if job.launched:
        align_replicas(model, engine.group, broadcast=engine.config.dist.fsdp.sync_module_states)
    loader = _make_loader(dataloader, engine) if dataloader is not None else None
    log_kept_dtypes(model, plan)
    materialise_buffers(model)
    with replaced_parameters_refused(model):
        sharded = engine.apply(model, plan, optimizer)
    attach(sharded)
    _log.info("%s: %s", engine.name, str(plan).splitlines()[0])
    if loader is not None:
        _describe_loader(loader, engine)
    if plan.left_to_model:
        _log.info("%s: no unit, as compute.chunked_loss computes with the head", ", ".join(plan.left_to_model))
    if plan.tensor_parallel.unsplit:
        _log.info("not split over tp: %s", plan.tensor_parallel.listed_unsplit)
    if plan.float8 is not None:
        _log.info("%s", str(plan.float8).strip())
    _log.debug("%s", plan)

    if config is not None:
        config.note_use()
    given = [part for part in (loader, optimizer) if part is not None]
    return arguments.Accelerated((model, *given)) if given else model


def shard_loader(dataloader: Iterable[Any], model: nn.Module) -> data.AsyncLoader:
    """Shard another loader, such as the one for evaluation, in the same way as `accelerate()` shards its loader.

    Args:
        dataloader: A DataLoader, or any iterable of batches. Its `batch_size` is the batch size of one device.
        model: The model that `accelerate()` returned.

    Raises:
        DataError: The dataloader cannot be sharded.
    """
    return shard_loader_for_trainer(dataloader, model)


def shard_loader_for_trainer(
    dataloader: Iterable[Any], model: nn.Module, *, fills_count: bool = True
) -> data.AsyncLoader:
    """Shard a loader as `shard_loader()` does, for a trainer, which may not count the rows that complete a batch."""
    engine = sharded_model(model).engine
    loader = _make_loader(dataloader, engine)
    _describe_loader(loader, engine, fills_count=fills_count)
    return loader


def accumulate(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager for all micro-batches of an accumulation window except the last.

    Inside the context, `backward()` accumulates gradients without reducing them. The first `backward()` outside of it
    reduces the sum. Divide the loss by the number of micro-batches yourself. In engines with one process per device the
    unsharded gradients stay on the device for the window. Without the context, gradients are reduced after each
    micro-batch: this needs less memory and more communication, and gives the same numbers.

    Args:
        model: The model that `accelerate()` returned.

    Example:
        >>> for index, batch in enumerate(micro_batches):
        ...     last = index == len(micro_batches) - 1
        ...     with contextlib.nullcontext() if last else torchacc.accumulate(model):
        ...         (model(**batch).loss / len(micro_batches)).backward()
    """
    return sharded_model(model).accumulate()


def full_state_dict(model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = True) -> dict[str, torch.Tensor]:
    """Return the unsharded parameters and buffers. Collective: call it on every process.

    Args:
        model: The model that `accelerate()` returned.
        rank0_only: If True, only rank 0 gets the tensors, and needs memory for them; others get an empty dict.
        cpu_offload: If True, the tensors are on the CPU, otherwise on the engine's device.

    Returns:
        A dict of original name -> unsharded tensor. Tied parameters are in it under each of their names.
    """
    return model_state.full_state_dict(sharded_model(model), rank0_only=rank0_only, cpu_offload=cpu_offload)


def state_dict(
    model: nn.Module,
    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT,
    config: FullStateDictConfig | None = None,
) -> dict[str, Any]:
    """Return a model's state in one of three forms. `model.load_state_dict()` accepts each of them.

    The full form is collective: call it on every process.

    Args:
        model: The model that `accelerate()` returned.
        state_dict_type: `FULL_STATE_DICT` for unsharded tensors by their original names; `SHARDED_STATE_DICT` for this
            process's part of each tensor, as a `TensorShard`; `LOCAL_STATE_DICT` for the tensors as this process stores
            them, which may be flattened and padded. The last two load at the same number of devices only.
        config: Which process gets a full state, and on which device.
    """
    sharded, config = sharded_model(model), config or FullStateDictConfig()
    if state_dict_type is StateDictType.FULL_STATE_DICT:
        return model_state.full_state_dict(sharded, rank0_only=config.rank0_only, cpu_offload=config.offload_to_cpu)
    if state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return model_state.sharded_state_dict(sharded)
    return model_state.local_state_dict(sharded)


def optim_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT,
    config: FullStateDictConfig | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state in one of three forms. `optimizer.load_state_dict()` accepts each of them.

    The full form also loads into an optimizer of the unsharded model. It is collective: call it on every process.

    Args:
        model: The model that `accelerate()` returned.
        optimizer: An optimizer of its parameters.
        state_dict_type: As for `state_dict()`.
        config: Which process gets a full state, and on which device.
    """
    sharded, config = sharded_model(model), config or FullStateDictConfig()
    if state_dict_type is StateDictType.FULL_STATE_DICT:
        return optimizer_state.full_optim_state_dict(
            sharded, optimizer, rank0_only=config.rank0_only, cpu_offload=config.offload_to_cpu
        )
    if state_dict_type is StateDictType.SHARDED_STATE_DICT:
        return optimizer_state.sharded_optim_state_dict(sharded, optimizer)
    return optimizer.state_dict()


@dataclass(frozen=True)
class Description:
    """How a model is sharded. `str()` formats it as a few lines."""

    engine: str
    """The engine's name."""
    mesh: str
    """The axes of the mesh and their sizes."""
    num_devices: int
    """Number of devices in the job."""
    num_parameters: int
    """Number of elements of the model's parameters. Tied parameters count once."""
    num_trained_parameters: int
    """Number of those elements whose parameters were not frozen when the model was sharded."""
    num_parameters_per_device: int
    """Number of elements that one device stores between steps, including padding."""
    num_units: int
    """Number of FSDP units, including the model itself."""
    compute_dtype: str
    """Dtype of matrix products."""

    def __str__(self) -> str:
        share = self.num_parameters_per_device / self.num_parameters
        is_any_frozen = self.num_trained_parameters < self.num_parameters
        trained = f"of which {self.num_trained_parameters:,} train, " if is_any_frozen else ""
        return "\n".join(
            [
                f"engine      {self.engine}, {self.num_devices} device{'s' * (self.num_devices > 1)}, "
                f"compute in {self.compute_dtype}",
                f"mesh        {self.mesh}",
                f"parameters  {self.num_parameters:,} in {self.num_units} units, {trained}"
                f"{self.num_parameters_per_device:,} ({share:.1%}) on each device",
            ]
        )


def describe(model: nn.Module) -> Description:
    """Describe how a model is sharded. Any process may call it.

    Args:
        model: The model that `accelerate()` returned.
    """
    sharded = sharded_model(model)
    engine, plan = sharded.engine, sharded.plan
    return Description(
        engine=engine.name,
        mesh=plan.mesh.describe(),
        num_devices=plan.mesh.num_devices,
        num_parameters=plan.numel,
        num_trained_parameters=plan.num_trained,
        num_parameters_per_device=sharded.shards.local_numel(),
        num_units=len(plan.units),
        compute_dtype=plan.compute_dtype,
    )


def compile_report() -> CompileReport:
    """Return what this process has compiled so far, and the reason for each recompilation."""
    engine = registry.active_engine()
    return engine.compile_report() if engine is not None else CompileReport()


def sync() -> None:
    """Execute the operations that the engine has recorded so far. It has no effect in engines that record nothing.

    A loop over a loader from `accelerate()` does not need it: the loader calls it after each batch.
    """
    engine = registry.active_engine()
    if engine is not None:
        engine.sync()


mark_step = sync
"""TorchAcc's and torch_xla's older name of `sync`."""


def _make_loader(dataloader: Iterable[Any], engine: Engine) -> data.AsyncLoader:
    options = engine.config.dataloader

    def end_batch() -> None:
        engine.end_batch()
        note_batch()
        progress.mark(progress.Phase.DATA)

    def together(collective: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
        def call(own: Any) -> Any:
            engine.group.expect_all("a loop over a sharded loader")
            return collective(own)

        return call if engine.job.launched else None

    sharded = data.shard_loader(
        dataloader,
        data_parallel_size=engine.mesh.data_parallel_size,
        shards=engine.data_parallel_ranks,
        agree=together(engine.group.broadcast_object),
        gather=together(engine.group.all_gather_objects),
    )
    return data.AsyncLoader(
        sharded,
        put=engine.to_device,
        transform=_bucketing(engine),
        on_batch=end_batch,
        # Without a transfer there is nothing to overlap, and a second thread would draw from the same generator.
        prefetch=0 if engine.device.type == "cpu" else options.prefetch,
    )


def _describe_loader(loader: data.AsyncLoader, engine: Engine, *, fills_count: bool = True) -> None:
    """Log once how a loader's batches are dealt out: a script may make the same one for each evaluation."""
    described = loader.describe(fills_count=fills_count)
    if described not in engine.logged_loaders:
        engine.logged_loaders.add(described)
        _log.info("loader: %s", described)


def _bucketing(engine: Engine) -> data.Bucketing | None:
    options = engine.config.dataloader
    if options.buckets is None and options.max_length is None:
        return None
    return data.Bucketing(
        data.make_buckets(options.buckets, options.max_length, options.num_buckets),
        pad_values=options.pad_value_dict or {},
        pad_dims=options.pad_dim_dict or {},
        truncate=options.truncate,
    )


def _refuse_second_time(model: nn.Module) -> None:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if any(HANDLE in vars(module) for module in modules):
        raise ConfigError(
            "accelerate() has already sharded this model or a part of it: pass the outermost module, once; for "
            "a further loader use shard_loader()"
        )


def _refuse_optimizer_of_others(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    own = set(model.parameters())
    if optimizer is not None and not any(p in own for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError("the optimizer handed to accelerate() holds no parameter of the model")


def _list_options_without_effect(engine: Engine) -> None:
    for path, reason in engine.options_without_effect().items():
        *sections, name = path.split(".")
        section: Any = engine.config
        for part in sections:
            section = getattr(section, part)
        if getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True):
            _log.info("config.%s has no effect in the engine %s: %s", path, engine.name, reason)
