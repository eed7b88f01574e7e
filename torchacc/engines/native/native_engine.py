"""PyTorch's own FSDP2 on whatever device PyTorch has, one process per device; needs no torch_xla."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from torchacc import env
from torchacc.config import Config
from torchacc.engines import attention_kernels
from torchacc.engines.base import NO_GPU, Engine
from torchacc.engines.compile_report import CompileReport
from torchacc.engines.memory import Memory, keep_freed_memory
from torchacc.engines.native import (
    compiled_units,
    device_copies,
    expert_parallel,
    float8_training,
    split_sequence,
    split_stages,
    splittable_layers,
    step_in_backward,
)
from torchacc.engines.patches.private_names import check_installed_torch
from torchacc.engines.process_group import accelerator_kind, sees_own_device_alone
from torchacc.engines.sharded_model import ShardedModel
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import ShardingPlan, make_plan

_PER_PARAMETER = "FSDP2 shards each parameter by itself and gathers a unit's parameters together"
_OFFLOADS = ("dist.fsdp.cpu_offload", "memory.offload_activations")
_ON_HOST = "the device is the host's CPU, so that there is nothing to move"


class NativeEngine(Engine):
    """FSDP2's `fully_shard` on a mesh whose dimensions are roles: replicate, shard, tensor."""

    name: ClassVar[str] = "native"
    no_effect: ClassVar[dict[str, str]] = {
        "dist.fsdp.flatten_parameters": _PER_PARAMETER,
        "dist.fsdp.use_orig_params": _PER_PARAMETER,
        "dist.fsdp.limit_all_gathers": "FSDP2 holds at most the unit that runs and the next, and has no other way",
        "dist.fsdp.shard_output_callable": "it belongs to SPMD",
        "dist.fsdp.use_spmd": "it belongs to XLA",
        "compute.scan_layers": "units that are alike share their graphs, where they are compiled",
    }

    def options_without_effect(self) -> Mapping[str, str]:
        """Return what means nothing to FSDP2, or not on this machine's devices."""
        no_effect = dict(self.no_effect)
        if not self.config.compute.compile:
            no_effect["compute.compile_cache"] = "nothing is compiled without compute.compile"
        if self.device.type == "cuda":
            return {**no_effect, "memory.gpu_preallocate": "PyTorch takes memory as it is needed"}
        on_cpu = dict.fromkeys(_OFFLOADS, _ON_HOST) if self.device.type == "cpu" else {}
        return {**no_effect, **NO_GPU, **on_cpu}

    @classmethod
    def count_devices(cls, config: Config, job: Job) -> int:
        """Return the number of processes: each has one device."""
        return job.num_processes

    @classmethod
    def runs_on_cpu(cls) -> bool:
        """Return whether PyTorch has no accelerator here."""
        return accelerator_kind() is None

    @classmethod
    def find_devices(cls) -> str:
        """Return PyTorch's accelerators, or the CPU."""
        kind = accelerator_kind()
        if kind is None:
            return "CPU"
        names = [_name(torch.device(kind, index)) for index in range(torch.accelerator.device_count())]
        return ", ".join(f"{kind}:{index} {name}" for index, name in enumerate(names))

    def check(self, model: nn.Module) -> None:
        """Refuse what FSDP2 does not have, and more processes than this machine has accelerators."""
        attention_kernels.check_device(self.config, self.device)
        super().check(model)
        check_installed_torch()
        if self.config.compute.compile:
            compiled_units.check(self.config, self.device)
            if self.config.compute.chunked_loss:
                compiled_units.check_regions(make_plan(model, self.config, self.mesh))
        if self.config.compute.fp8:
            float8_training.check(self.config, self.device)
        empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
        if empty:
            raise ConfigError(
                f"the parameter {empty[0]!r} has no elements, and FSDP2 cannot sum an empty gradient over devices: "
                "leave it out of the model, or keep it as a buffer (register_buffer)"
            )
        _refuse_modules_of_torch_xla(model)
        check_axes(self.config, self.mesh, model)
        if self.config.dist.fsdp.backward_prefetch == "BACKWARD_POST":
            raise ConfigError(
                "dist.fsdp.backward_prefetch = 'BACKWARD_POST' is not available: FSDP2 frees a unit and reduces its "
                "gradients in one go, with no moment in between to gather the next: use 'BACKWARD_PRE', or 'NONE', "
                "which holds one unit less"
            )
        if self.config.memory.step_in_backward:
            step_in_backward.check(self.config, self.mesh)
        if self.device.type != "cpu":
            self._check_devices()

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse an optimizer, or none, that cannot step inside of backward, where the config asks for that."""
        if self.config.memory.step_in_backward:
            step_in_backward.check_optimizer(optimizer)

    def _check_devices(self) -> None:
        """Refuse more processes on this machine than this one sees devices, but where it sees its own alone."""
        found = torch.accelerator.device_count()
        if self.job.local_num_processes <= found or sees_own_device_alone():
            return
        scheduler = env.scheduler()
        instead = f"`torchrun --nproc_per_node={found} your_script.py`"
        if scheduler is not None:
            instead = (
                f"have {scheduler} start {found} on each machine, or give each task one device (--gpus-per-task=1)"
            )
        raise ConfigError(
            f"{scheduler or 'the launcher'} started {self.job.local_num_processes} processes on this machine, of which "
            f"this one sees {found} {self.device.type} devices, and each takes one: {instead}"
        )

    def setup(self, plan: ShardingPlan) -> None:
        """Start the process group, and choose this process's device."""
        self.group.start()
        if self.device.type == "cpu":
            keep_freed_memory()
        else:
            torch.accelerator.set_device_index(self.device.index)
        fraction = self.config.memory.gpu_fraction
        if self.device.type == "cuda" and fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction, self.device)
        if self.config.compute.compile:
            compiled_units.prepare(self.config)

    @cached_property
    def device(self) -> torch.device:
        """This process's accelerator, or the CPU where there is none."""
        kind = accelerator_kind()
        if kind is None:
            return torch.device("cpu")
        return torch.device(kind, 0 if sees_own_device_alone() else self.job.local_rank)

    @cached_property
    def device_mesh(self) -> Any:
        """FSDP2's DeviceMesh: (replicate, shard), or (shard,) where there is one replica.

        On a mesh with a single replica, FSDP2 would still reduce each gradient over it.
        """
        roles = [Role.REPLICATE, Role.SHARD] if self.mesh.size(Role.REPLICATE) > 1 else [Role.SHARD]
        return self._process_mesh[tuple(role.value for role in roles)]

    @cached_property
    def parameter_mesh(self) -> Any:
        """The DeviceMesh over which parameters are distributed: that of FSDP2 and, where layers are split, of `tp`."""
        if self.mesh.size(Role.TENSOR) == 1:
            return self.device_mesh
        return self._process_mesh[(*self.device_mesh.mesh_dim_names, Role.TENSOR.value)]

    @property
    def tp_mesh(self) -> Any:
        """The DeviceMesh of the processes that share layers."""
        return self._process_mesh[Role.TENSOR.value]

    @cached_property
    def expert_mesh(self) -> Any:
        """What `expert_parallel.make_mesh()` makes. Made by a collective of all ranks."""
        return expert_parallel.make_mesh(self.mesh, self.device.type, self.group)

    @cached_property
    def _process_mesh(self) -> Any:
        mesh = self.mesh
        order = (Role.PIPELINE, Role.REPLICATE, Role.SHARD, Role.TENSOR)
        roles = [role for role in order if role is Role.SHARD or mesh.size(role) > 1]
        ranks = sorted(range(mesh.num_devices), key=lambda rank: mesh.index(rank, *roles))
        return self.group.device_mesh(self.device.type, {role.value: mesh.size(role) for role in roles}, ranks)

    def random_state(self) -> dict[str, Any]:
        """Return the state of the CPU's and of the accelerator's generator."""
        state = super().random_state()
        if self.device.type != "cpu":
            state["device"] = torch.get_device_module(self.device).get_rng_state()
        return state

    def check_random_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what is not a state of the CPU's generator, or of the accelerator's where there is one."""
        super().check_random_state(state)
        if not isinstance(state.get("device", state["torch"]), torch.Tensor):
            raise TypeError("the device's is not a tensor")

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Put the CPU's generator where it was, and the accelerator's, where it was one then, too."""
        super().set_random_state(state)
        if self.device.type != "cpu" and "device" in state:
            torch.get_device_module(self.device).set_rng_state(state["device"])

    def compile_report(self) -> CompileReport:
        """Return what torch.compile has compiled in this process so far, where it compiles units."""
        return compiled_units.report() if self.config.compute.compile else super().compile_report()

    def memory(self) -> Memory | None:
        """Return the most that tensors have taken of the accelerator, or the process's where it is the CPU."""
        if self.device.type == "cpu":
            return super().memory()
        return Memory(torch.accelerator.max_memory_allocated(self.device), "device")

    def device_name(self) -> str:
        """Return the accelerator's name, or that it is the CPU."""
        return super().device_name() if self.device.type == "cpu" else _name(self.device)

    def apply(self, model: nn.Module, plan: ShardingPlan, optimizer: torch.optim.Optimizer | None) -> ShardedModel:
        """Shard a model in place with `fully_shard`, or leave it as it is where nobody shares its parameters."""
        from torchacc.engines.native.native_model import NativeModel
        from torchacc.engines.native.pipelined_model import PipelinedModel
        from torchacc.engines.native.replicated_model import ReplicatedModel

        is_split = plan.pipeline.size > 1
        kind = ReplicatedModel if plan.is_replicated else PipelinedModel if is_split else NativeModel
        sharded = kind(self, model, plan)
        sharded.shard(optimizer)
        if plan.steps_in_backward:
            assert optimizer is not None
            sharded.step_in_backward(optimizer)
        return sharded

    def to_device(self, batch: Any) -> Any:
        """Move a host batch to the device."""
        return batch if self.device.type == "cpu" else device_copies.to_device(batch, self.device)


def check_axes(config: Config, mesh: Mesh, model: nn.Module) -> None:
    """Refuse models, and options, that cannot be had with the axes along which devices compute parts of one step.

    Args:
        config: A resolved config.
        mesh: Its mesh.
        model: The model; it is only read.

    Raises:
        ConfigError: The first that cannot.
    """
    if mesh.size(Role.SEQUENCE) > 1:
        split_sequence.check(config, mesh, model)
    if mesh.size(Role.EXPERT) > 1:
        expert_parallel.check(config, mesh, model)
    if mesh.size(Role.PIPELINE) > 1:
        split_stages.check(config, mesh, model)
    if mesh.size(Role.TENSOR) > 1:
        splittable_layers.check(model, make_plan(model, config, mesh))


def _name(device: torch.device) -> str:
    name: str = getattr(torch.get_device_module(device), "get_device_name", lambda index: device.type)(device.index)
    return name


def _refuse_modules_of_torch_xla(model: nn.Module) -> None:
    """Refuse modules that torch_xla has put in the place of PyTorch's, and that compute on its devices only.

    Raises:
        ConfigError: The model has one.
    """
    for name, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("torch_xla."):
            raise ConfigError(
                f"{name or 'the model'} is torch_xla's {kind.__name__}, which computes on XLA devices only: importing "
                f"torch_xla, as transformers does, has replaced torch.nn.{kind.__name__}. Set USE_TORCH_XLA=0 before "
                f"Python starts, or build the model with torch.nn.modules.rnn.{kind.__name__}"
            )
