"""PyTorch's own FSDP2 on whatever device PyTorch has, one process per device; needs no torch_xla."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import register_dataclass, tree_leaves
from torch.utils.checkpoint import checkpoint

from torchacc.config import Config
from torchacc.data.tree import map_tensors
from torchacc.engines import recompute
from torchacc.engines.base import NO_GPU, Engine, ShardedModel, average_scalars, remap_optimizer
from torchacc.engines.meta import materialise_parameters
from torchacc.engines.process_group import hushed_stdout
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError
from torchacc.layout import Holding
from torchacc.plan import PlannedParameter, WrapPlan

_PER_PARAMETER = "FSDP2 shards each parameter by itself and gathers a unit's parameters together"


class NativeEngine(Engine):
    """FSDP2's `fully_shard` on a mesh (dp, fsdp); with fsdp = 1 that is plain data parallelism."""

    kind: ClassVar[str] = "native"
    no_effect: ClassVar[dict[str, str]] = {
        "dist.fsdp.flatten_parameters": _PER_PARAMETER,
        "dist.fsdp.use_orig_params": _PER_PARAMETER,
        "dist.fsdp.limit_all_gathers": "FSDP2 limits them by itself",
        "dist.fsdp.backward_prefetch": "FSDP2 prefetches the next unit in backward by itself",
        "dist.fsdp.forward_prefetch": "FSDP2 prefetches the next unit in forward by itself",
        "dist.fsdp.shard_output_callable": "it belongs to SPMD",
        "dist.fsdp.use_spmd": "it belongs to XLA",
        "compute.compile_cache": "nothing is compiled",
    }

    def options_without_effect(self) -> Mapping[str, str]:
        """Return what means nothing to FSDP2, or not on this machine's devices."""
        if self.device.type == "cuda":
            return {**self.no_effect, "memory.gpu_preallocate": "PyTorch takes memory as it is needed"}
        return {**self.no_effect, **NO_GPU}

    @classmethod
    def count_devices(cls, config: Config, job: Job) -> int:
        """Return the number of processes: each has one device."""
        return job.num_processes

    @classmethod
    def find_devices(cls) -> str:
        """Return PyTorch's accelerators, or the CPU."""
        if not torch.accelerator.is_available():
            return "CPU"
        kind = str(torch.accelerator.current_accelerator())
        names = [
            getattr(torch.get_device_module(kind), "get_device_name", lambda index: kind)(index)
            for index in range(torch.accelerator.device_count())
        ]
        return ", ".join(f"{kind}:{index} {name}" for index, name in enumerate(names))

    def check(self, model: nn.Module) -> None:
        """Refuse to split layers, and more processes than this machine has accelerators."""
        if self.topology.size("tp") > 1:
            raise ConfigError(
                f"config.dist.tp.size = {self.topology.size('tp')} is not available in the native engine yet: use "
                "config.backend = 'xla' with config.dist.fsdp.use_spmd = True, or config.dist.fsdp.size"
            )
        if self.device.type == "cpu":
            return
        found = torch.accelerator.device_count()
        if self.job.local_num_processes > found:
            raise ConfigError(
                f"the launcher started {self.job.local_num_processes} processes on this machine, which has {found} "
                f"{self.device.type} devices: `torchrun --nproc_per_node={found} your_script.py`"
            )

    def setup(self, plan: WrapPlan) -> None:
        """Start the process group, and choose this process's device."""
        self.group.start()
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device.index)
        fraction = self.config.memory.gpu_fraction
        if self.device.type == "cuda" and fraction is not None:
            torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    @cached_property
    def device(self) -> torch.device:
        """This process's accelerator, or the CPU where there is none."""
        if not torch.accelerator.is_available():
            return torch.device("cpu")
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, self.job.local_rank)

    @property
    def data_shards(self) -> range:
        """This process's one device."""
        shard = self.topology.data_shard(self.job.rank)
        return range(shard, shard + 1)

    @cached_property
    def mesh(self) -> Any:
        """The DeviceMesh (dp, fsdp), with the processes where the topology has them; (fsdp,) without replicas.

        On a mesh with a dp axis of one, FSDP2 would still reduce each gradient over it.
        """
        from torch.distributed.device_mesh import DeviceMesh

        size, device = self.topology.size, self.topology.device
        ranks = [[device(dp=replica, fsdp=shard) for shard in range(size("fsdp"))] for replica in range(size("dp"))]
        with hushed_stdout():
            if size("dp") == 1:
                return DeviceMesh(self.device.type, ranks[0], mesh_dim_names=("fsdp",))
            return DeviceMesh(self.device.type, ranks, mesh_dim_names=("dp", "fsdp"))

    def random_state(self) -> dict[str, Any]:
        """Return the state of the CPU's and of the accelerator's generator."""
        state = super().random_state()
        if self.device.type != "cpu":
            state["device"] = torch.get_device_module(self.device).get_rng_state()
        return state

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Put the CPU's generator where it was, and the accelerator's, where it was one then, too."""
        super().set_random_state(state)
        if self.device.type != "cpu" and "device" in state:
            torch.get_device_module(self.device).set_rng_state(state["device"])

    def apply(self, model: nn.Module, plan: WrapPlan, optimizer: torch.optim.Optimizer | None) -> "NativeModel":
        """Shard a model in place with `fully_shard`."""
        sharded = NativeModel(self, model, plan)
        sharded.shard(optimizer)
        return sharded

    def put(self, batch: Any) -> Any:
        """Move a host batch to the device."""
        if self.device.type == "cpu":
            return batch
        return map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True), batch)


class NativeModel(ShardedModel):
    """A model whose parameters are DTensors."""

    engine: NativeEngine

    def shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Move the model to the device and shard its units."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._move_to_device()
        originals = {planned.name: self.model.get_parameter(planned.name) for planned in self.plan.parameters}
        policy = MixedPrecisionPolicy()
        if self._lowered is not None:
            # What the inputs are cast to is left to autocast: a float input may be a target or a position.
            policy = MixedPrecisionPolicy(self._lowered, torch.float32, cast_forward_inputs=False)
        self.install(self.run)
        # The model itself first: fully_shard looks for a module's parameters outside of what is sharded already, and so
        # would not find one that is tied between two units, and is therefore the model's.
        for unit in (self.plan.units[-1], *self.plan.units[:-1]):
            module = self.model.get_submodule(unit.name)
            # Here and not for the whole model, so that no more than one unit is ever whole.
            materialise_parameters(self.model, unit.parameters, self.engine.device)
            own = {id(self.model.get_parameter(parameter.name)) for parameter in unit.parameters}
            left = {parameter for parameter in module.parameters() if id(parameter) not in own}
            again = self.plan.gathers_again_in(unit)
            fully_shard(
                module, mesh=self.engine.mesh, mp_policy=policy, ignored_params=left, reshard_after_forward=again
            )
        shards: dict[torch.Tensor, nn.Parameter] = {
            original: self.model.get_parameter(name) for name, original in originals.items()
        }
        for original, new in shards.items():
            vars(new).update({key: value for key, value in vars(original).items() if key not in vars(new)})
        recompute.install(self.model, self.plan.recomputed, _checkpoint)
        if optimizer is not None:
            remap_optimizer(optimizer, shards, lambda parameter, state: _like(shards[parameter], state))

    def _move_to_device(self) -> None:
        for parameter in self.model.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(self.engine.device).contiguous()  # fully_shard() takes no other
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.engine.device)

    @property
    def _lowered(self) -> torch.dtype | None:
        return None if self.plan.compute_dtype == "float32" else getattr(torch, self.plan.compute_dtype)

    def run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's forward in the compute dtype, and give its scalars their means over all devices."""
        with torch.autocast(self.engine.device.type, dtype=self._lowered, enabled=self._lowered is not None):
            output = inner(*args, **kwargs)
        _let_pytree_see(output)
        return average_scalars(output, self.engine.group.mean) if self.engine.job.launched else output

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`."""
        norm = super().clip_grad_norm_(max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _drop_window(self) -> None:
        raise EngineError(
            "zero_grad() inside of an accumulation window: FSDP2 holds the window's gradients and cannot drop them. "
            "Complete the window with a backward outside of torchacc.accumulate() first"
        )

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        """Keep whole gradients until the first backward outside of the context reduces their sum."""
        self.model.set_requires_gradient_sync(False)  # type: ignore[operator]
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)  # type: ignore[operator]

    @property
    def replica(self) -> tuple[int, int]:
        """This process's place on the axis of replicas."""
        return self._coordinates["dp"], self.engine.topology.size("dp")

    @property
    def num_shards(self) -> int:
        """The processes on the axis of shards."""
        return self.engine.topology.size("fsdp")

    @cached_property
    def _coordinates(self) -> dict[str, int]:
        return self.engine.topology.coordinates(self.engine.job.rank)

    def _holdings(self) -> Iterator[tuple[nn.Parameter, Holding]]:
        for planned in self.plan.parameters:
            members = ((planned.name, planned.shape),)
            size = _largest_shard(planned, self.num_shards)
            yield (
                self.model.get_parameter(planned.name),
                Holding(planned.name, members, size, self._coordinates["fsdp"]),
            )

    @torch.no_grad()
    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the local tensors of DTensors, flat, on the host."""
        return [_local(tensor).detach().cpu().reshape(-1) for tensor in tensors]

    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor that lies like a parameter."""
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        return DTensor.from_local(
            local.view(_local(parameter).shape).to(self.engine.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    @torch.no_grad()
    def assign(self, parameter: nn.Parameter, local: torch.Tensor) -> None:
        """Copy new values into the shard that is there."""
        shard = _local(parameter)
        shard.copy_(local.view(shard.shape))

    def local_numel(self) -> int:
        """Return the number of parameter elements that this process holds at rest, those of the largest shard."""
        size = self.engine.topology.size("fsdp")
        return sum(_largest_shard(parameter, size) for parameter in self.plan.parameters)


def _checkpoint(module: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    has_run = False

    def run(*args: Any) -> Any:
        nonlocal has_run
        again, has_run = has_run, True
        with recompute.statistics_kept(module) if again else nullcontext():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False)


def _let_pytree_see(output: Any) -> None:
    """Register the dataclasses in an output with PyTorch's pytree, by which FSDP2 finds what backward starts from."""
    for leaf in tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            register_dataclass(type(leaf))
            _let_pytree_see(output)
            return


def _largest_shard(parameter: PlannedParameter, size: int) -> int:
    rows = parameter.shape[0]
    return -(-rows // size) * (parameter.numel // rows) if rows else 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _like(shard: Any, whole: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, shard.device_mesh, shard.placements)
