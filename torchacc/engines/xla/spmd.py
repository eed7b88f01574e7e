"""One process drives all devices: one program, which XLA partitions by the annotations made here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from torchacc.config import Config, requested_devices
from torchacc.engines.base import remap_optimizer
from torchacc.engines.xla import quirks, runtime
from torchacc.engines.xla.base import XlaEngine, XlaModel
from torchacc.engines.xla.gather import Gatherer, Weight, install_unit
from torchacc.engines.xla.partition import Partition, Spec, partition
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.layout import Holding
from torchacc.plan import WrapPlan

_ONE_PROGRAM = "one program holds the whole model: there is one copy of each parameter, by its own name"


class SpmdEngine(XlaEngine):
    """One process and one program for all devices of this machine, or for its only one."""

    kind: ClassVar[str] = "xla-spmd"
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
        if not config.dist.fsdp.use_spmd:
            return 1
        if runtime.runs_on_cpu():
            return requested_devices(config)
        import torch_xla.runtime as xr

        return int(xr.global_runtime_device_count())

    def setup(self) -> None:
        """Start the runtime with the mesh's devices."""
        runtime.use_plain_scheduler()
        runtime.start(num_devices=self.topology.num_devices, spmd=self.is_partitioned)

    @property
    def is_partitioned(self) -> bool:
        """Whether there is more than one device to spread over."""
        return self.topology.num_devices > 1

    @property
    def data_shards(self) -> range:
        """All data-parallel devices: this process feeds each of them."""
        return range(self.topology.num_data_shards)

    @cached_property
    def mesh(self) -> Any:
        """The torch_xla mesh of the topology."""
        import torch_xla.distributed.spmd as xs

        devices = np.arange(self.topology.num_devices)
        return xs.Mesh(devices, self.topology.shape, self.topology.axis_names)

    @cached_property
    def _op_shardings(self) -> dict[Spec, Any]:
        return {}

    def apply(self, model: nn.Module, plan: WrapPlan, optimizer: torch.optim.Optimizer | None) -> "SpmdModel":
        """Shard a model in place by annotations."""
        sharded = SpmdModel(self, model, plan)
        sharded.shard(optimizer)
        return sharded

    def to_device(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move tensors to the devices, split over the first dimension where it divides."""
        return self.transfer(tensors, [self.batch_spec(tensor) for tensor in tensors])

    def batch_spec(self, tensor: torch.Tensor) -> Spec | None:
        """Return how a tensor with one row for each sample is split; None where its rows do not divide."""
        if not tensor.dim() or tensor.shape[0] % self.topology.num_data_shards:
            return None
        return (self.topology.data_axes, *[None] * (tensor.dim() - 1))

    def transfer(self, tensors: Sequence[torch.Tensor], specs: Sequence[Spec | None]) -> list[torch.Tensor]:
        """Move tensors to the devices in one transfer, each split as its spec says; None is a copy on each device."""
        from torch_xla import _XLAC

        def sharding(tensor: torch.Tensor, spec: Spec | None) -> Any:
            how = self.partition(spec or (None,) * tensor.dim())
            return _XLAC.XlaShardingSpec(tensor, *astuple(how), False)

        shardings = [sharding(*pair) for pair in zip(tensors, specs, strict=True)] if self.is_partitioned else None
        return runtime.to_device(tensors, shardings)

    def annotate(self, tensor: torch.Tensor, spec: Spec) -> None:
        """Say how a tensor of the program is split."""
        from torch_xla import _XLAC

        spec = tuple(spec)
        if spec not in self._op_shardings:
            self._op_shardings[spec] = _XLAC.OpSharding(*astuple(self.partition(spec)))
        _XLAC._xla_annotate_custom_sharding(tensor, self._op_shardings[spec])

    def partition(self, spec: Spec) -> Partition:
        """Return how a tensor with this spec lies on the mesh."""
        return partition(spec, dict(self.topology.axes))

    def parameter_spec(self, shape: Sequence[int]) -> Spec:
        """Return how a parameter is split: its largest dimension that divides, over the fsdp axis."""
        size = self.topology.size("fsdp")
        fitting = [dim for dim, length in enumerate(shape) if length % size == 0 and length >= size]
        if size == 1 or not fitting:
            return (None,) * len(shape)
        largest = max(fitting, key=lambda dim: shape[dim])
        return tuple("fsdp" if dim == largest else None for dim in range(len(shape)))


class SpmdModel(XlaModel):
    """A model that lies annotated on the mesh of an SPMD engine."""

    engine: SpmdEngine

    def shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Move the model to the mesh and install the hooks that gather its weights."""
        engine = self.engine
        quirks.prepare(self.model, partitioned=engine.is_partitioned)
        replaced: dict[torch.Tensor, nn.Parameter] = {}
        for unit in self.plan.units:
            module = self.model.get_submodule(unit.name)
            pairs = list(self.make_weights(unit.parameters, self._place))
            replaced |= {original: weight.shard for original, weight in pairs}
            if engine.is_partitioned:
                # A 1-D weight is left to XLA, which gathers so little by itself without harm.
                split = [w for _, w in pairs if len(w.shape) > 1 and any(engine.parameter_spec(w.shape))]
                install_unit(module, _SpmdGatherer(split, engine, gathers_again=self.plan.gathers_again_in(unit)))
                self._constrain_output(module)
        self.move_buffers()
        self.install(self.run)
        if optimizer is not None:
            remap_optimizer(optimizer, replaced, lambda parameter, state: self._place(state))
        runtime.sync()

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return self.engine.transfer([tensor], [self.engine.parameter_spec(tensor.shape)])[0]

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return zeros that are split like a parameter."""
        return self._place(torch.zeros(parameter.shape, dtype=parameter.dtype))

    def _constrain_output(self, module: nn.Module) -> None:
        engine, user_rule = self.engine, self.engine.config.dist.fsdp.shard_output_callable

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if user_rule is not None:
                user_rule(output, engine.mesh)
                return
            tensor = _first_tensor(output)
            spec = engine.batch_spec(tensor) if tensor is not None else None
            if tensor is not None and spec is not None:
                engine.annotate(tensor, spec)

        module.register_forward_hook(hook)

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        """Run each backward by itself, so that the recorded program does not grow over the window."""
        yield
        runtime.sync()

    def _holdings(self) -> Iterator[tuple[nn.Parameter, Holding]]:
        for planned in self.plan.parameters:
            members = ((planned.name, planned.shape),)
            yield self.model.get_parameter(planned.name), Holding(planned.name, members, planned.numel, index=0)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole tensors, flat, on the host."""
        if not self.engine.is_partitioned:
            return super().fetch(tensors)
        runtime.sync()
        return [tensor.reshape(-1) for tensor in runtime.join_shards([tensor.detach() for tensor in tensors])]

    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is split like a parameter."""
        return self._place(local.view(parameter.shape))

    def local_numel(self) -> int:
        """Return the number of parameter elements that one device holds at rest."""
        size = self.engine.topology.size("fsdp")
        split = [p.numel // (size if any(self.engine.parameter_spec(p.shape)) else 1) for p in self.plan.parameters]
        return sum(split)


class _SpmdGatherer(Gatherer):
    """Whole weights by annotation: XLA turns the change of sharding into an all-gather."""

    def __init__(self, weights: Sequence[Weight], engine: SpmdEngine, *, gathers_again: bool) -> None:
        super().__init__(weights)
        self._engine = engine
        self.keeps_weights = not gathers_again

    def gather(self) -> list[torch.Tensor]:
        return [_Gather.apply(weight.shard, weight.dtype, self) for weight in self.weights]

    def gather_again(self, weight: Weight) -> torch.Tensor:
        import torch_xla.core.xla_model as xm

        shard = weight.shard.detach().clone()
        # Without the barrier XLA sees that this is the gather of forward, and keeps its result instead.
        xm.optimization_barrier_([shard])
        return self.whole(shard, weight.dtype)

    def whole(self, shard: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if shard.dtype == dtype:
            copy = shard.clone()
        else:
            # Said twice, so that the cast happens before the gather and half as much travels.
            copy = shard.to(dtype)
            self.split(copy)
        self._engine.annotate(copy, (None,) * copy.dim())
        return copy

    def split(self, tensor: torch.Tensor) -> None:
        self._engine.annotate(tensor, self._engine.parameter_spec(tensor.shape))


class _Gather(torch.autograd.Function):
    """The whole of a split parameter; the gradient is split again, which makes XLA reduce it."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, dtype: torch.dtype, gatherer: _SpmdGatherer) -> torch.Tensor:
        ctx.gatherer, ctx.dtype = gatherer, shard.dtype
        return gatherer.whole(shard, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad.clone() if grad.dtype == ctx.dtype else grad.to(ctx.dtype)
        ctx.gatherer.split(grad)
        return grad, None, None


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else ()
    return next((value for value in values if isinstance(value, torch.Tensor) and value.dim()), None)
