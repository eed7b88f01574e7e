"""From a `distributed` section to engine, processes and devices, and the config that `accelerate()` reads."""

import os
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from torchacc.config import Config
from torchacc.engines import registry
from torchacc.engines.process_group import accelerator_kind, sees_own_device_alone
from torchacc.env import Job
from torchacc.errors import ConfigError, shown
from torchacc.parallel.axes import AXES, Role, axis_with
from torchacc.parallel.mesh import Mesh
from torchacc.train.config import DistributedConfig, StageFSDPConfig

_IS_SHARDED = {"fsdp": True, "ddp": False}
_FLOAT32 = {"bf16": False, "fp16": False, "master_dtype": "float32"}
_PRECISIONS: dict[str, dict[str, Any]] = {
    "32": _FLOAT32,
    "32-true": _FLOAT32,
    "bf16": {**_FLOAT32, "bf16": True},
    "bf16-mixed": {**_FLOAT32, "bf16": True},
    "bf16-true": {**_FLOAT32, "bf16": True, "master_dtype": "bfloat16"},
    "16": {**_FLOAT32, "fp16": True},
    "16-mixed": {**_FLOAT32, "fp16": True},
}
"""Lightning's names, and what they set in `compute`."""
_MOST_DEVICES_OF_A_CORE = 32
"""Far more than is of use, and few enough for a small machine's memory and threads."""


@dataclass(frozen=True)
class DeviceLayout:
    """Where a run lies: engine, processes, devices."""

    engine: str
    """The engine's name."""
    num_nodes: int
    """Machines."""
    num_processes: int
    """Processes on each machine."""
    num_devices: int
    """Devices of all machines."""
    config: Config
    """The config for `accelerate()`; not resolved yet, and frozen."""
    mesh: Mesh
    """The mesh."""
    notes: tuple[str, ...]
    """What was decided for the user, and what has no effect."""

    @property
    def data_parallel_size(self) -> int:
        """Devices that see different data."""
        return self.mesh.data_parallel_size

    def rows(self) -> dict[str, str]:
        """Return what `--dry-run` prints of it."""
        processes = "one process drives them all" if self.num_devices > 1 else "in this process"
        if self.num_nodes * self.num_processes > 1:
            one_each = f"{self.num_processes} process{'es' * (self.num_processes > 1)}"
            processes = f"{one_each} on {f'each of {self.num_nodes} machines' if self.num_nodes > 1 else 'one machine'}"
        strategy = self.config.dist.fsdp.sharding_strategy
        return {
            "devices": f"{self.num_devices}, engine {self.engine}, {processes}",
            "mesh": f"{self.mesh.describe()}, {strategy}",
            "precision": _precision_in_words(self.config),
        }


def make_layout(
    distributed: DistributedConfig, torchacc: dict[str, Any], *, precision: str | int | None, launched: Job | None
) -> DeviceLayout:
    """Decide engine, processes and devices, and check that they can be had here.

    Args:
        distributed: The section, after what the command asks for.
        torchacc: Further options of `torchacc.Config`.
        precision: Lightning's name of a precision; None for what `torchacc` says.
        launched: The processes that a launcher has started; None where none has.

    Raises:
        ConfigError: Something contradicts something else, or cannot be done here.
    """
    notes: list[str] = []
    config = Config.from_dict(deepcopy(torchacc))
    config.backend = distributed.engine
    _set_precision(config, precision)
    num_nodes, devices = _count(distributed, launched, notes)
    _set_sharding(config, distributed, num_nodes, devices, notes)
    total = num_nodes * devices
    job = Job(num_processes=total, local_num_processes=devices)
    name = _choose_engine(config, job, num_nodes, launched, notes)
    one_for_all = registry.engine_class(name).drives_all_devices
    job = Job() if one_for_all else job
    if not one_for_all:
        _check_processes(num_nodes, devices, launched)
    _check_devices(devices, name, notes)
    _check_batchnorm(distributed, name, total, notes)
    engine = registry.make_engine(config, job)
    if engine.mesh.size(Role.TENSOR) == 1:  # with tp it needs the model, and accelerate() asks again
        engine.check(nn.Module())
    config.freeze()
    return DeviceLayout(
        engine=engine.name,
        num_nodes=num_nodes,
        num_processes=job.local_num_processes,
        num_devices=total,
        config=config,
        mesh=engine.mesh,
        notes=tuple(notes),
    )


def sharding_strategy(distributed: DistributedConfig) -> str:
    """Return what is sharded: NO_SHARD where every device holds the full model."""
    return distributed.fsdp.sharding_strategy if _is_sharded(distributed) else "NO_SHARD"


def _is_sharded(distributed: DistributedConfig) -> bool:
    return _IS_SHARDED.get(distributed.strategy, distributed.fsdp.enabled)


def _set_precision(config: Config, precision: str | int | None) -> None:
    if precision is None:
        return
    if str(precision) not in _PRECISIONS:
        raise ConfigError(f"precision {shown(precision)} is not one of {', '.join(_PRECISIONS)}")
    for name, value in _PRECISIONS[str(precision)].items():
        setattr(config.compute, name, value)


def _precision_in_words(config: Config) -> str:
    computed = "bfloat16" if config.compute.bf16 else "float16" if config.compute.fp16 else "float32"
    computed += f" with products in float8 ({config.compute.fp8_recipe})" if config.compute.fp8 else ""
    return f"{computed}, parameters in {config.compute.master_dtype}"


def _count(distributed: DistributedConfig, launched: Job | None, notes: list[str]) -> tuple[int, int]:
    """Return the number of machines, and of devices on each."""
    devices = distributed.devices
    if isinstance(devices, int):
        return distributed.num_nodes, devices
    if launched is not None and launched.launched:
        return launched.num_processes // launched.local_num_processes, launched.local_num_processes
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 1
    notes.append(f"devices: auto takes {found}")
    return distributed.num_nodes, found


def _set_sharding(
    config: Config, distributed: DistributedConfig, num_nodes: int, devices: int, notes: list[str]
) -> None:
    fsdp, into, is_sharded = distributed.fsdp, config.dist.fsdp, _is_sharded(distributed)
    if is_sharded and not fsdp.enabled:
        raise ConfigError(
            "distributed.strategy = 'fsdp' with distributed.fsdp.enabled = False: they contradict each other; write "
            "strategy: ddp, or leave enabled out"
        )
    total, dist = num_nodes * devices, config.dist
    filled_up = {axis_with(Role.BATCH, Role.REPLICATE), axis_with(Role.BATCH, Role.SHARD)}
    others = prod(getattr(dist, axis).size for axis in AXES.keys() - filled_up)
    if is_sharded:
        for name in StageFSDPConfig.model_fields.keys() - {"enabled"}:
            setattr(into, name, getattr(fsdp, name))
        if into.sharding_strategy == "HYBRID_SHARD" and dist.dp.size is None:
            dist.dp.size = num_nodes
    else:
        into.sharding_strategy = "NO_SHARD"
        notes += [
            f"distributed.fsdp.{name} = {shown(getattr(fsdp, name))} has no effect: nothing is sharded"
            for name in sorted(fsdp.model_fields_set - {"enabled"})
            if getattr(fsdp, name) != StageFSDPConfig.model_fields[name].default
        ]
    if "size" not in into.model_fields_set:
        into.size = max(1, total // (others * (dist.dp.size or 1)))
    if dist.dp.size is None:
        dist.dp.size = max(1, total // (others * into.size))
    sizes = {axis: getattr(dist, axis).size for axis in AXES}
    if (asked := prod(sizes.values())) != total:
        arithmetic = " * ".join(f"{axis}({size})" for axis, size in sizes.items())
        raise ConfigError(
            f"dist: {arithmetic} = {asked}, and the run has {num_nodes} machines * {devices} devices = {total}: choose "
            "sizes with that product, or change distributed.devices"
        )


def _choose_engine(config: Config, job: Job, num_nodes: int, launched: Job | None, notes: list[str]) -> str:
    """Choose the engine; one process for all devices where XLA can, and no launcher has started several."""
    fsdp = config.dist.fsdp
    is_asked = "use_spmd" in fsdp.model_fields_set
    if is_asked and fsdp.use_spmd and num_nodes > 1:
        raise ConfigError(
            f"torchacc.dist.fsdp.use_spmd = True on {num_nodes} machines: on several the trainer starts a process for "
            "each device; leave it out. A script of your own may run one program on all hosts of a TPU slice"
        )
    may_drive_all = not is_asked or fsdp.use_spmd
    are_launched = launched is not None and launched.launched
    choice = registry.choose(config, job)  # by what the file says, before a process for all devices is written into it
    if choice.fallback_reason is not None:
        notes.append(f"engine: auto takes {choice.engine}, as {choice.fallback_reason} is asked for, which XLA has not")
        return choice.engine
    fsdp.use_spmd = may_drive_all and num_nodes == 1 and job.num_processes > 1 and not are_launched
    engine = registry.choose(config, job).engine
    fsdp.use_spmd = fsdp.use_spmd and registry.engine_class(engine).drives_all_devices
    return engine


def _check_processes(num_nodes: int, devices: int, launched: Job | None) -> None:
    """Refuse a launcher's processes that are not one for each device."""
    if launched is None:
        return
    total, local = launched.num_processes, launched.local_num_processes
    if (total, local) != (num_nodes * devices, devices):
        raise ConfigError(
            f"the launcher has started {total} processes, {local} of them on this machine, and the run has {num_nodes} "
            f"machines with {devices} devices, each with a process of its own: pass --num-nodes {total // local} "
            f"--devices {local}, or leave the launcher out: the command starts the processes itself"
        )


def _check_devices(devices: int, engine: str, notes: list[str]) -> None:
    """Refuse more devices than this machine has, or than its CPU can simulate."""
    if not registry.engine_class(engine).runs_on_cpu():
        accelerator = accelerator_kind()
        if accelerator and not sees_own_device_alone() and devices > (found := torch.accelerator.device_count()):
            raise ConfigError(
                f"distributed.devices = {devices}, and this machine has {found} of kind {accelerator}: ask for no more"
            )
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if devices > cores * _MOST_DEVICES_OF_A_CORE:
        raise ConfigError(
            f"distributed.devices = {devices}: each is a share of this machine's {cores} cores, which can stand for "
            f"{cores * _MOST_DEVICES_OF_A_CORE} at most: ask for no more; `torchacc plan` says for any number what "
            "each device needs"
        )
    if devices > cores:
        notes.append(f"{devices} devices share this machine's {cores} cores, so that each is slower")


def _check_batchnorm(distributed: DistributedConfig, engine: str, num_devices: int, notes: list[str]) -> None:
    if not distributed.sync_batchnorm:
        return
    if num_devices > 1 and not registry.engine_class(engine).drives_all_devices:
        raise ConfigError(
            "distributed.sync_batchnorm = True: with one process per device each has its own BatchNorm statistics. "
            "Use engine: xla on one machine, where one program sees the batch of all devices, or leave it out"
        )
    notes.append("sync_batchnorm: one program sees the batch of all devices, so that it is so by nature")
