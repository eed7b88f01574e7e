"""One process drives all devices, or one on each TPU host: one program, which XLA partitions by annotations."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from torchacc.config import Config, requested_devices
from torchacc.data.tree import map_tensors
from torchacc.engines.attention_kernels import IN_BLOCKS
from torchacc.engines.patches import model_patches
from torchacc.engines.xla import hardware, runtime, spread_experts
from torchacc.engines.xla.partition import Partition, Spec, partition
from torchacc.engines.xla.several_hosts import HostShards
from torchacc.engines.xla.shard_map import shard_map
from torchacc.engines.xla.spmd_model import SpmdModel
from torchacc.engines.xla.tpu import PLATFORM
from torchacc.engines.xla.xla_engine import XlaEngine
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.logging import get_logger
from torchacc.parallel.axes import Role, axes_in, entry_of
from torchacc.parallel.device_order import order_devices
from torchacc.parallel.plan import ShardingPlan

_log = get_logger(__name__)

_ONE_PROGRAM = "one program holds the whole model: there is one copy of each parameter, by its own name"


class SpmdEngine(XlaEngine):
    """One program for all devices, and one process for those of a machine."""

    name: ClassVar[str] = "xla-spmd"
    drives_all_devices: ClassVar[bool] = True
    no_effect: ClassVar[dict[str, str]] = {
        **XlaEngine.no_effect,
        "dist.fsdp.flatten_parameters": _ONE_PROGRAM,
        "dist.fsdp.sync_module_states": _ONE_PROGRAM,
    }

    @classmethod
    def count_devices(cls, config: Config, job: Job) -> int:
        """Return the devices of all hosts: on the CPU as many as the config asks for."""
        if job.launched:
            hardware.check_one_each_host(job)
        hardware.check_drives_all(job)
        if not config.dist.fsdp.use_spmd:
            return 1
        if runtime.runs_on_cpu():
            return requested_devices(config)
        runtime.use_gpu_plugin(config.memory, drives_all=True)
        return runtime.count_devices(job.num_processes)

    def options_without_effect(self) -> Mapping[str, str]:
        """Return what means nothing to one program: of several hosts each has a copy of the model, to be made alike."""
        found = super().options_without_effect()
        return {path: why for path, why in found.items() if not (self.job.launched and path.endswith("module_states"))}

    def check(self, model: nn.Module) -> None:
        """Refuse contradicting splits of activations, and a dtype for sums, which are inside of XLA's products."""
        super().check(model)
        if self.job.launched and self.num_lengths > 1:
            raise ConfigError(
                f"config.dataloader has buckets of {self.num_lengths} lengths, of which each of the "
                f"{self.job.num_processes} hosts would choose one by its own samples, and one program has one: set "
                "config.dataloader.num_buckets = 1, or one bucket"
            )
        dist = self.config.dist
        split = {
            "dist.tp.sequence_parallel = True": dist.tp.sequence_parallel,
            f"dist.sp.size = {dist.sp.size}": dist.sp.size > 1,
        }
        for option in (option for option, is_asked in split.items() if is_asked):
            if dist.fsdp.shard_output_callable is not None:
                raise ConfigError(
                    f"config.{option} splits the outputs of units, and so does "
                    "config.dist.fsdp.shard_output_callable: leave one of them out"
                )
        if self.mesh.size(Role.EXPERT) > 1:
            spread_experts.check(self.config, self.mesh, model)
        if dist.sp.size > 1:
            _refuse_with_split_samples(self.config, model, self.attention)
        if self.config.compute.scan_layers and (dist.tp.size > 1 or dist.fsdp.shard_output_callable is not None):
            raise ConfigError(
                "compute.scan_layers = True does not go with dist.tp.size > 1 or dist.fsdp.shard_output_callable yet: "
                "set it to False"
            )
        if self.config.compute.reduce_dtype != "float32":
            raise ConfigError(
                f"compute.reduce_dtype = {self.config.compute.reduce_dtype!r} is not available under SPMD: XLA sums a "
                "gradient over the devices as part of the product that it comes from, in a dtype of its choice. Leave "
                "it at 'float32', or start one process per device: `torchrun --nproc_per_node="
                f"{self.mesh.num_devices} your_script.py` with config.dist.fsdp.use_spmd = False"
            )
        if self.config.compute.bf16 and self.is_partitioned:
            _log.info("under SPMD the gradients of products in bfloat16 are bfloat16, and XLA may sum them in it")
        if self.mesh.size(Role.EXPERT) > 1:
            _log.info("under SPMD each expert computes all tokens, with zeros for those that have not chosen it")

    def setup(self, plan: ShardingPlan) -> None:
        """Start the runtime with the mesh's devices. Collective: every process."""
        if self.job.launched:
            self.group.start()
            self.group.prepare_call_checks()
        runtime.use_plain_scheduler(recomputes=bool(plan.recomputed))
        runtime.use_gpu_plugin(self.config.memory, drives_all=self.config.dist.fsdp.use_spmd)
        self.open_compile_cache()
        runtime.start(
            num_devices=self.mesh.num_devices,
            spmd=self.uses_virtual_device,
            seed=self.group.broadcast_object(torch.initial_seed()),  # hosts that drew others would run other programs
            num_processes=self.job.num_processes,
        )
        if self.job.launched:
            self.host_shards = HostShards(self.group, self.mesh, self.device_order)

    host_shards: HostShards | None = None
    """This process's share of the devices' tensors, where there are several processes."""

    @property
    def is_partitioned(self) -> bool:
        """Whether there is more than one device to spread over."""
        return self.mesh.num_devices > 1

    @property
    def uses_virtual_device(self) -> bool:
        """Whether tensors lie on SPMD's virtual device: also on a single GPU, on which torch_xla 2.9 allows none."""
        return self.is_partitioned or runtime.runs_on_gpu()

    @property
    def data_parallel_ranks(self) -> Sequence[int]:
        """The data-parallel devices that this process feeds: all of them, or those of its host."""
        return range(self.mesh.data_parallel_size) if self.host_shards is None else self.host_shards.data_parallel_ranks

    @property
    def num_batch_devices(self) -> int:
        """How many data-parallel devices the rows that a model is called with are of: all of them."""
        return self.mesh.data_parallel_size

    @cached_property
    def device_order(self) -> list[int]:
        """XLA's number of the device at each place on the mesh: on TPUs neighbours lie on the last axes."""
        places = runtime.device_places() if self.is_partitioned and runtime.platform() == PLATFORM else None
        return list(range(self.mesh.num_devices)) if places is None else order_devices(places, self.mesh.shape)

    @cached_property
    def xla_mesh(self) -> Any:
        """The mesh as torch_xla takes it."""
        import torch_xla.distributed.spmd as xs

        return xs.Mesh(np.array(self.device_order), self.mesh.shape, self.mesh.axis_names)

    @cached_property
    def _op_shardings(self) -> dict[Spec, Any]:
        return {}

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which has the rows of all devices; of one on the host each process has its own."""
        is_own = self.host_shards is not None and tensor.device.type == "cpu"
        return self.host_shards.all_rows(tensor) if self.host_shards is not None and is_own else tensor

    def to_device(self, batch: Any) -> Any:
        """Move a host batch to the devices, all of its tensors in one transfer; of several hosts each has its own."""
        return super().to_device(batch if self.host_shards is None else map_tensors(self.host_shards.whole_rows, batch))

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return copies of tensors on the host; None where a program would have to gather them from several hosts."""
        if self.host_shards is not None and any(tensor.device.type == "xla" for tensor in tensors):
            return None
        return super().copy_to_host(tensors)

    def seed(self, seed: int) -> None:
        """Seed PyTorch's generator and XLA's alike on every host, as all of them run one program."""
        torch.manual_seed(seed)
        runtime.set_random_seed(seed)

    def apply(self, model: nn.Module, plan: ShardingPlan, optimizer: torch.optim.Optimizer | None) -> SpmdModel:
        """Shard a model in place by annotations."""
        sharded = SpmdModel(self, model, plan)
        sharded.shard(optimizer)
        self.sync()  # lets the transfers to the devices begin
        return sharded

    def move_inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move tensors to the devices, split over the first dimension, and tokens along their length, where it can."""
        return self.transfer(tensors, [self._input_spec(tensor) for tensor in tensors])

    def _input_spec(self, tensor: torch.Tensor) -> Spec | None:
        """Return how an input is split: what has a row of tokens for each sample along its length, too."""
        return self.token_spec(tensor, self.mesh.axes(Role.SEQUENCE)) if tensor.dim() == 2 else self.batch_spec(tensor)

    def batch_spec(self, tensor: torch.Tensor) -> Spec | None:
        """Return how a tensor with one row for each sample is split; None where its rows do not divide."""
        if not tensor.dim() or tensor.shape[0] % self.mesh.data_parallel_size:
            return None
        return (self.mesh.data_axes, *[None] * (tensor.dim() - 1))

    def token_spec(self, tensor: torch.Tensor, axes: Sequence[str]) -> Spec | None:
        """Return how a tensor of shape (batch, length, …) is split, along its length over `axes` where that divides."""
        spec, size = self.batch_spec(tensor), prod(self.mesh.axis_size(axis) for axis in axes)
        if spec is None or size == 1:
            return spec
        if tensor.shape[1] % size:
            _warn_of_length(tensor.shape[1], size)
            return spec
        return (spec[0], entry_of(axes), *spec[2:])

    def transfer(self, tensors: Sequence[torch.Tensor], specs: Sequence[Spec | None]) -> list[torch.Tensor]:
        """Move tensors to the devices in one transfer, each split as its spec says; None is a copy on each device."""
        from torch_xla import _XLAC

        def sharding(tensor: torch.Tensor, spec: Spec | None) -> Any:
            how = self.partition(spec or (None,) * tensor.dim())
            return _XLAC.XlaShardingSpec(tensor, *astuple(how), False)

        tensors = [torch.zeros(each.shape, dtype=each.dtype) if each.is_meta else each for each in tensors]
        shardings = [sharding(*pair) for pair in zip(tensors, specs, strict=True)] if self.is_partitioned else None
        return runtime.to_device(tensors, shardings)

    def with_whole_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is split over its first dimension, or not at all."""
        if not self.is_partitioned:
            return tensor
        copy = tensor.clone()
        self.annotate(copy, self.batch_spec(copy) or (None,) * copy.dim())
        return copy

    def annotate(self, tensor: torch.Tensor, spec: Spec) -> None:
        """Say how a tensor of the program is split."""
        from torch_xla import _XLAC

        _XLAC._xla_annotate_custom_sharding(tensor, self._op_sharding(tuple(spec)))

    def by_heads(
        self, function: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run a function of tensors of shape (samples, heads, …) on each device's samples and heads."""
        if not self.is_partitioned:
            return function(*tensors)
        heads, samples = self.mesh.axes(Role.TENSOR), self.mesh.data_axes
        fits = all(tensor.shape[1] % self.mesh.size(Role.TENSOR) == 0 for tensor in tensors)
        axes = (
            entry_of(samples) if self.batch_spec(tensors[0]) else None,
            entry_of(heads) if heads and fits else None,
        )
        parts = [prod(self.mesh.axis_size(axis) for axis in axes_in(entry)) for entry in axes]
        sharding = lambda num_dims: self._op_sharding((*axes, *[None] * (num_dims - 2)))  # noqa: E731
        return shard_map(function, tensors, parts, sharding)

    def _op_sharding(self, spec: Spec) -> Any:
        """Return how a tensor with this spec lies on the mesh, as torch_xla takes it."""
        from torch_xla import _XLAC

        if spec not in self._op_shardings:
            self._op_shardings[spec] = _XLAC.OpSharding(*astuple(self.partition(spec)))
        return self._op_shardings[spec]

    def partition(self, spec: Spec) -> Partition:
        """Return how a tensor with this spec lies on the mesh."""
        return partition(spec, dict(self.mesh.sizes), self.device_order)


def _refuse_with_split_samples(config: Config, model: nn.Module, attention: str) -> None:
    if config.dist.ep.size == 1 and any(model_patches.chooses_experts(module) for module in model.modules()):
        raise ConfigError(
            f"config.dist.sp.size = {config.dist.sp.size} under SPMD, where XLA cannot partition the experts of "
            f"{type(model).__name__} along the samples unless they are spread, by config.dist.ep.size: set it, or use "
            'config.backend = "native", or config.dist.fsdp.size'
        )
    if attention in IN_BLOCKS:
        raise ConfigError(
            f"config.dist.sp.size = {config.dist.sp.size} with compute.attention = {attention!r}: each device has some "
            "of the queries, and blocks are cut from all of them: set config.compute.attention = 'auto'"
        )


@functools.cache  # once for each length
def _warn_of_length(length: int, size: int) -> None:
    _log.warning(
        "sequences of length %d are not a multiple of the %d devices that would share them, and stay unsplit: pad "
        "them, as config.dataloader.buckets does",
        length,
        size,
    )
