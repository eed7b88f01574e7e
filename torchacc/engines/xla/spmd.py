"""One process drives all devices: one program, which XLA partitions by the annotations made here."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from functools import cached_property, partial
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from torchacc.config import Config, requested_devices
from torchacc.engines.attention_kernels import IN_BLOCKS
from torchacc.engines.patches import model_patches
from torchacc.engines.patches.split_heads import HeadsStayApart
from torchacc.engines.xla import hardware, runtime, spread_experts
from torchacc.engines.xla.annotated_gather import AnnotatedGatherer
from torchacc.engines.xla.each_device import on_each_device
from torchacc.engines.xla.gather import Weight
from torchacc.engines.xla.partition import Partition, Spec, partition
from torchacc.engines.xla.scan import LayerScan
from torchacc.engines.xla.split_tokens import TokensStaySplit
from torchacc.engines.xla.xla_engine import XlaEngine, XlaModel
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import get_logger
from torchacc.parallel.axes import ParameterSpec, Role, dim_over, joined, named
from torchacc.parallel.experts import HELD_BY, spread_spec
from torchacc.parallel.plan import PlannedParameter, ShardingPlan
from torchacc.parallel.sharding import LocalShard, partition_spec, partitioned_shape, unsharded

_log = get_logger(__name__)

_ONE_PROGRAM = "one program holds the whole model: there is one copy of each parameter, by its own name"


class SpmdEngine(XlaEngine):
    """One process and one program for all devices of this machine, or for its only one."""

    name: ClassVar[str] = "xla-spmd"
    drives_all_devices: ClassVar[bool] = True
    no_effect: ClassVar[dict[str, str]] = {
        **XlaEngine.no_effect,
        "dist.fsdp.flatten_parameters": _ONE_PROGRAM,
        "dist.fsdp.sync_module_states": _ONE_PROGRAM,
    }

    @classmethod
    def count_devices(cls, config: Config, job: Job) -> int:
        """Return the devices that this process drives: on the CPU as many as the config asks for."""
        if job.launched:
            raise ConfigError(
                f"use_spmd=True drives all devices from one process, and this job has {job.num_processes}: start the "
                "script with `python`, or set config.dist.fsdp.use_spmd = False"
            )
        hardware.check_drives_all(job)
        if not config.dist.fsdp.use_spmd:
            return 1
        if runtime.runs_on_cpu():
            return requested_devices(config)
        runtime.use_gpu_plugin(config.memory, drives_all=True)
        return runtime.count_devices()

    def check(self, model: nn.Module) -> None:
        """Refuse contradicting splits of activations, and a dtype for sums, which are inside of XLA's products."""
        super().check(model)
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
            _refuse_with_split_samples(self.config, model)
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
        """Start the runtime with the mesh's devices."""
        runtime.use_plain_scheduler(recomputes=bool(plan.recomputed))
        runtime.use_gpu_plugin(self.config.memory, drives_all=self.config.dist.fsdp.use_spmd)
        self.open_compile_cache()
        runtime.start(num_devices=self.mesh.num_devices, spmd=self.uses_virtual_device)

    @property
    def is_partitioned(self) -> bool:
        """Whether there is more than one device to spread over."""
        return self.mesh.num_devices > 1

    @property
    def uses_virtual_device(self) -> bool:
        """Whether tensors lie on SPMD's virtual device: also on a single GPU, on which torch_xla 2.9 allows none."""
        return self.is_partitioned or runtime.runs_on_gpu()

    @property
    def data_shards(self) -> range:
        """All data-parallel devices: this process feeds each of them."""
        return range(self.mesh.num_data_shards)

    @cached_property
    def xla_mesh(self) -> Any:
        """The mesh as torch_xla takes it."""
        import torch_xla.distributed.spmd as xs

        devices = np.arange(self.mesh.num_devices)
        return xs.Mesh(devices, self.mesh.shape, self.mesh.axis_names)

    @cached_property
    def _op_shardings(self) -> dict[Spec, Any]:
        return {}

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor: this process has the rows of all devices."""
        return tensor

    def apply(self, model: nn.Module, plan: ShardingPlan, optimizer: torch.optim.Optimizer | None) -> "SpmdModel":
        """Shard a model in place by annotations."""
        sharded = SpmdModel(self, model, plan)
        sharded.shard(optimizer)
        return sharded

    def to_device(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move tensors to the devices, split over the first dimension, and tokens along their length, where it can."""
        return self.transfer(tensors, [self._input_spec(tensor) for tensor in tensors])

    def _input_spec(self, tensor: torch.Tensor) -> Spec | None:
        """Return how an input is split: what has a row of tokens for each sample along its length, too."""
        return self.token_spec(tensor, self.mesh.axes(Role.SEQUENCE)) if tensor.dim() == 2 else self.batch_spec(tensor)

    def batch_spec(self, tensor: torch.Tensor) -> Spec | None:
        """Return how a tensor with one row for each sample is split; None where its rows do not divide."""
        if not tensor.dim() or tensor.shape[0] % self.mesh.num_data_shards:
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
        return (spec[0], joined(axes), *spec[2:])

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
        axes = (joined(samples) if self.batch_spec(tensors[0]) else None, joined(heads) if heads and fits else None)
        parts = [prod(self.mesh.axis_size(axis) for axis in named(entry)) for entry in axes]
        sharding = lambda num_dims: self._op_sharding((*axes, *[None] * (num_dims - 2)))  # noqa: E731
        return on_each_device(function, tensors, parts, sharding)

    def _op_sharding(self, spec: Spec) -> Any:
        """Return how a tensor with this spec lies on the mesh, as torch_xla takes it."""
        from torch_xla import _XLAC

        if spec not in self._op_shardings:
            self._op_shardings[spec] = _XLAC.OpSharding(*astuple(self.partition(spec)))
        return self._op_shardings[spec]

    def partition(self, spec: Spec) -> Partition:
        """Return how a tensor with this spec lies on the mesh."""
        return partition(spec, dict(self.mesh.sizes))


class SpmdModel(XlaModel):
    """A model that lies annotated on the mesh of an SPMD engine."""

    engine: SpmdEngine

    def __init__(self, engine: SpmdEngine, model: nn.Module, plan: ShardingPlan) -> None:
        super().__init__(engine, model, plan)
        self._specs: dict[torch.Tensor, ParameterSpec] = {}
        """How each parameter is split."""

    def shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Shard the model, and let the transfers to the devices begin."""
        super().shard(optimizer)
        self.engine.sync()

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Move the model to the mesh and install the hooks that gather its weights."""
        engine = self.engine
        spread = [experts.module for experts in self.plan.experts]
        model_patches.prepare(self.model, partitioned=engine.is_partitioned, spread=spread)
        replaced: dict[torch.Tensor, nn.Parameter] = {}
        for unit in self.plan.units:
            module = self.model.get_submodule(unit.name)
            weights: list[Weight] = []
            for planned in unit.parameters:
                spec = self._spec_of(planned, is_spread=unit.name in spread)
                for original, weight in self._make_weights([planned], partial(self._place, spec=spec)):
                    replaced[original] = weight.shard
                    self._specs[weight.shard] = spec
                    weights.append(weight)
            if engine.is_partitioned:
                # A 1-D weight is left to XLA, which gathers so little by itself without harm.
                split = [weight for weight in weights if len(weight.shape) > 1 and self._is_sharded(weight.shard)]
                again = self.plan.is_resharded_after_forward(unit)
                stay = HELD_BY if unit.name in spread else (Role.TENSOR,)
                gatherer = AnnotatedGatherer(split, engine.annotate, self._specs, stay, reshard_after_forward=again)
                self._install_unit(module, gatherer)
                if unit.name in spread:
                    spread_experts.install(module, engine.mesh, engine.annotate)
                else:
                    self._constrain_output(module, between_units=bool(unit.name))
        if self.plan.tensor_parallel.sequence_parallel or engine.mesh.size(Role.SEQUENCE) > 1:
            self._constrain_embeddings()
        self._install_recompute()
        self._scans = [self._make_scan(name) for name in self.plan.scanned]
        self._move_buffers()
        self._install_forward(self._run)
        return replaced

    def _spec_of(self, planned: PlannedParameter, *, is_spread: bool) -> ParameterSpec:
        """Return how a parameter is split at rest."""
        mesh = self.engine.mesh
        how = spread_spec(planned.shape, mesh) if is_spread else self.plan.tensor_parallel.spec_of(planned.name)
        return partition_spec(planned.shape, mesh, how)

    def _shard_state(self, shard: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """Return a full tensor that is split like its parameter."""
        return self.place(shard, full)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Hold the patches of a forward; where heads are split, with products that leave them where they are."""
        with ExitStack() as stack:
            if self.plan.tensor_parallel.size > 1:
                stack.enter_context(HeadsStayApart())
            if self.engine.mesh.size(Role.SEQUENCE) > 1:
                stack.enter_context(TokensStaySplit(self._place_tokens))
            for scan in self._scans:
                stack.enter_context(scan.running())
            stack.enter_context(super().patched())
            yield

    def _make_scan(self, name: str) -> LayerScan:
        """Let a list of layers run as a loop."""
        layers = self.model.get_submodule(name)
        first = dict(layers[0].named_parameters())  # type: ignore[index]
        inner = set(layers[0].modules())  # type: ignore[index]
        units = [unit for unit in self._units if unit.module in inner]
        gatherers = [unit.gatherer for unit in units if isinstance(unit.gatherer, AnnotatedGatherer)]
        gathered = {weight.shard: (weight, gatherer) for gatherer in gatherers for weight in gatherer.weights}

        def unshard(parameter: str, shard: torch.Tensor) -> torch.Tensor:
            if first[parameter] not in gathered:
                return shard
            weight, gatherer = gathered[first[parameter]]
            return gatherer.gather_one(shard, weight)

        def annotate(tensor: torch.Tensor, spec: Spec | None) -> None:
            if spec is not None and self.engine.is_partitioned:
                self.engine.annotate(tensor, spec)

        return LayerScan(
            layers,  # type: ignore[arg-type]
            units,
            unshard=unshard,
            annotate_stack=lambda parameter, stack: annotate(stack, (None, *self._specs[first[parameter]])),
            annotate_output=lambda output: annotate(output, self._activation_spec(output, between_units=True)),
            patches=self.patched,
        )

    def _is_sharded(self, parameter: torch.Tensor) -> bool:
        return dim_over(self._specs[parameter], Role.SHARD) is not None

    def _place(self, tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
        return self.engine.transfer([tensor], [spec])[0]

    def _constrain_output(self, module: nn.Module, *, between_units: bool) -> None:
        engine, user_rule = self.engine, self.engine.config.dist.fsdp.shard_output_callable

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if user_rule is not None:
                user_rule(output, engine.xla_mesh)
                return
            tensor = _first_tensor(output)
            spec = self._activation_spec(tensor, between_units) if tensor is not None else None
            if tensor is not None and spec is not None:
                engine.annotate(tensor, spec)

        module.register_forward_hook(hook)

    def _place_tokens(self, tensor: torch.Tensor, are_split: bool) -> torch.Tensor:
        """Return queries, keys or values of shape (batch, heads, tokens, size) with a part of the tokens, or all."""
        engine, mesh = self.engine, self.engine.mesh
        spec, heads, tokens = engine.batch_spec(tensor), mesh.axes(Role.TENSOR), mesh.axes(Role.SEQUENCE)
        if spec is None or tensor.shape[1] % mesh.size(Role.TENSOR) or tensor.shape[2] % mesh.size(Role.SEQUENCE):
            return tensor
        placed = tensor.clone()
        engine.annotate(placed, (spec[0], joined(heads), joined(tokens) if are_split else None, None))
        return placed

    def _constrain_embeddings(self) -> None:
        """Split what the model's own embeddings return along the sequence, as that is what the first unit gets."""
        units = [unit.name for unit in self.plan.units if unit.name]
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and not any(f"{name}.".startswith(f"{unit}.") for unit in units):
                self._constrain_output(module, between_units=True)

    def _activation_spec(self, tensor: torch.Tensor, between_units: bool) -> Spec | None:
        """Return how activations of shape (batch, length, …) are split; None where the batch does not divide."""
        if tensor.dim() != 3:
            return self.engine.batch_spec(tensor)
        is_sequence_parallel = between_units and self.plan.tensor_parallel.sequence_parallel
        roles = [Role.SEQUENCE, Role.TENSOR] if is_sequence_parallel else [Role.SEQUENCE]
        return self.engine.token_spec(tensor, self.engine.mesh.axes(*roles))

    def _before_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of an optimizer that asks for numbers in the midst of its step."""
        if isinstance(optimizer, torch.optim.LBFGS):
            _log.warning(
                "LBFGS decides by numbers in the midst of its step: XLA compiles what was recorded before each of "
                "them, which takes minutes. config.backend = 'native' runs it as it is; or take another one, such "
                "as AdamW"
            )

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        """Run each backward by itself, so that the recorded program does not grow over the window."""
        yield
        self.engine.sync()

    def _local_shards(self) -> Iterator[tuple[nn.Parameter, LocalShard]]:
        for planned in self.plan.parameters:
            yield self.model.get_parameter(planned.name), unsharded(planned.name, planned.shape)

    def check_parameters(self) -> None:
        """Check that the model has the parameters that were sharded, each with its shape."""
        super().check_parameters()
        for parameter, local_shard in self.local_shards.items():
            [(name, shape)] = local_shard.members
            if tuple(parameter.shape) != shape:
                raise EngineError(
                    f"{name!r} was sharded with the shape {shape}, and has got data of shape "
                    f"{tuple(parameter.shape)}: change the shapes of parameters before accelerate()"
                )

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return full tensors, flat, on the host."""
        if not self.engine.is_partitioned:
            return super().fetch(tensors)
        self.engine.sync(wait=True)  # shards are only there once they are computed
        return [tensor.reshape(-1) for tensor in runtime.join_shards([tensor.detach() for tensor in tensors])]

    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is split like a parameter."""
        return self._place(local.view(parameter.shape), self._specs[parameter])

    def local_numel(self) -> int:
        """Return the number of parameter elements that one device holds at rest."""
        mesh = self.engine.mesh
        return sum(prod(partitioned_shape(shard.shape, mesh, spec)) for shard, spec in self._specs.items())


def _refuse_with_split_samples(config: Config, model: nn.Module) -> None:
    if config.dist.ep.size == 1 and any(model_patches.chooses_experts(module) for module in model.modules()):
        raise ConfigError(
            f"config.dist.sp.size = {config.dist.sp.size} under SPMD, where XLA cannot partition the experts of "
            f"{type(model).__name__} along the samples unless they are spread, by config.dist.ep.size: set it, or use "
            'config.backend = "native", or config.dist.fsdp.size'
        )
    if (name := config.compute.attention) in IN_BLOCKS:
        raise ConfigError(
            f"config.dist.sp.size = {config.dist.sp.size} with compute.attention = {name!r}: each device has some "
            "of the queries, and blocks are cut from all of them: set config.compute.attention = 'auto'"
        )


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else ()
    return next((value for value in values if isinstance(value, torch.Tensor) and value.dim()), None)


@functools.cache  # once for each length
def _warn_of_length(length: int, size: int) -> None:
    _log.warning(
        "sequences of length %d are no multiple of the %d devices that would share them, and stay unsplit: pad them, "
        "as config.dataloader.buckets does",
        length,
        size,
    )
