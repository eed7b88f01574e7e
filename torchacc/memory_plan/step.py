"""One training step of a model, studied once, and what it needs for any strategy and number of devices."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from torchacc.config import Config, resolve
from torchacc.config.resolve import requested_devices
from torchacc.engines.attention_kernels import IN_BLOCKS, asked_of_xla
from torchacc.engines.native.native_engine import check_axes
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.memory_plan.lifetimes import Lifetimes, eager_lifetimes, fused_lifetimes
from torchacc.memory_plan.one_device import Sent, Traffic, on_one_device
from torchacc.memory_plan.strategies import DeviceBytes, native_bytes, xla_bytes
from torchacc.memory_plan.trace import Trace, record
from torchacc.parallel.axes import MODEL_PARALLEL, Role, axes_with, axis_with
from torchacc.parallel.experts import on_mesh
from torchacc.parallel.mesh import STRATEGIES, from_config
from torchacc.parallel.plan import ShardingPlan, make_plan

MOST_DEVICES = 1024
"""How far `Step.smallest()` looks."""
_NOT_PLANNED = (
    "memory.offload_activations",
    "dist.fsdp.cpu_offload",
    "compute.scan_layers",
    "compute.fp16",
    "compute.fp8",
)


@dataclass(frozen=True)
class PlannedBackend:
    """How the engines of a backend run a step."""

    runs_eagerly: bool
    lifetimes: Callable[[Trace], Lifetimes]
    count: Callable[[ShardingPlan, Sequence[Lifetimes], int, int], DeviceBytes]


PLANNED_BACKENDS: Mapping[str, PlannedBackend] = {
    "xla": PlannedBackend(False, fused_lifetimes, xla_bytes),
    "native": PlannedBackend(True, eager_lifetimes, native_bytes),
}
"""What can be planned, by the names of `config.backend`."""


@dataclass(frozen=True)
class StageStep:
    """What is known of the step of one microbatch through a stage; without stages, of the batch through the model."""

    lifetimes: Lifetimes
    sent: tuple[Sent, ...] = ()
    """What a device sends to those that compute other parts of the same microbatch."""
    work: tuple[tuple[int, int], ...] = ()
    """For each operation of a microbatch its FLOPs, and the bytes that it reads and makes."""


@dataclass(frozen=True)
class DeviceStep:
    """What is known of the step of a device with one stage, or several."""

    stages: tuple[StageStep, ...]
    batch_bytes: int
    """Of the batch, and of the model's buffers."""

    def plan_of(self, plan: ShardingPlan) -> ShardingPlan:
        """Return what a plan says of this device."""
        stages = [each.lifetimes.stage for each in self.stages]
        return plan.of_stages(stages) if plan.pipeline.size > 1 else plan


@dataclass(frozen=True)
class Step:
    """What is known of a training step, for any number of devices."""

    plan: ShardingPlan
    """On as few devices as there can be: of one replica that is not sharded."""
    devices: tuple[DeviceStep, ...]
    """Of those that have stages the first, the last, and the one with the most parameters between them."""
    num_states: int
    """Tensors in a parameter's shape that the optimizer keeps for it."""
    backend: PlannedBackend
    clips: bool = False
    """Whether gradients are clipped by their norm, which waits for all of them."""

    @property
    def model_parallel_size(self) -> int:
        """Devices that compute parts of the same step: of its layers, tokens, experts and stages."""
        return self.plan.mesh.num_devices

    def on(self, num_devices: int, strategy: str, *, replicas: int = 1) -> DeviceBytes:
        """Return the memory of the device that needs the most.

        Args:
            num_devices: All devices.
            strategy: A sharding strategy.
            replicas: How many copies of the model there are, `config.dist.dp.size`.

        Raises:
            ConfigError: The strategy cannot be had on so many devices.
        """
        return self.needed_by(self.plan_on(num_devices, strategy, replicas=replicas))

    def needed_by(self, plan: ShardingPlan) -> DeviceBytes:
        """Return the memory of the device that needs the most, by a plan of `plan_on()`."""
        found = [
            self.backend.count(
                each.plan_of(plan), [stage.lifetimes for stage in each.stages], self.num_states, each.batch_bytes
            )
            for each in self.devices
        ]
        needed = max(found, key=lambda needed: needed.total)
        if self.backend.runs_eagerly or not self.clips:
            return needed
        waiting = needed.parameters * plan.num_trained // plan.numel  # as large as the parameters at rest, at most
        return replace(needed, gradients=needed.gradients + waiting)

    def plan_on(self, num_devices: int, strategy: str, *, replicas: int = 1) -> ShardingPlan:
        """Return the plan of the model on so many devices.

        Args:
            num_devices: All devices.
            strategy: A sharding strategy.
            replicas: How many copies of the model there are, `config.dist.dp.size`.

        Raises:
            ConfigError: The strategy cannot be had on so many devices.
        """
        if num_devices % (replicas * self.model_parallel_size):
            of = f", each of a multiple of {self.model_parallel_size} devices" if self.model_parallel_size > 1 else ""
            choose = replicas * self.model_parallel_size
            raise ConfigError(
                f"{num_devices} devices cannot hold {replicas} replicas{of}: choose a multiple of {choose}"
                if of
                else f"{num_devices} devices cannot hold {replicas} replicas: choose a divisor of {num_devices}"
            )
        config = Config()
        dist = config.dist
        dist.dp.size, dist.fsdp.size = replicas, num_devices // (replicas * self.model_parallel_size)
        dist.fsdp.sharding_strategy = strategy  # type: ignore[assignment]
        for axis in axes_with(*MODEL_PARALLEL):
            getattr(dist, axis).size = self.plan.mesh.axis_size(axis)
        config = resolve(config, Job(num_processes=num_devices), num_devices=num_devices)
        again = STRATEGIES[strategy].reshard_after_forward
        mesh = from_config(config)
        return replace(self.plan, mesh=mesh, reshard_after_forward=again, experts=on_mesh(self.plan.experts, mesh))

    def smallest(self, memory_bytes: int, strategy: str, *, replicas: int = 1) -> int | None:
        """Return the fewest devices, 1 to 8 or a multiple of 8, on which it fits; None where no number up to 1024 does.

        Args:
            memory_bytes: What each device has.
            strategy: A sharding strategy.
            replicas: How many copies of the model there are.
        """
        fewest = 2 * replicas if strategy == "HYBRID_SHARD" else replicas
        every = (*range(1, 9), *range(16, MOST_DEVICES + 1, 8))
        whole = replicas * self.model_parallel_size
        counts: list[int] = [n for n in every if n % whole == 0 and n >= fewest * self.model_parallel_size]

        def fits(num_devices: int) -> bool:
            try:
                return self.on(num_devices, strategy, replicas=replicas).total <= memory_bytes
            except ConfigError:  # experts do not divide over so many
                return False

        step = lcm(whole, 8)  # of all counts above 8

        def is_tried(n: int) -> bool:
            return n <= 8 or (n // step) & (n // step - 1) == 0 or n == counts[-1]

        bound = next((n for n in counts if is_tried(n) and fits(n)), None)
        if bound is None or bound <= 8:
            return bound
        return min(n for n in counts if bound // 2 < n <= bound and fits(n))


def study(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    config: Config,
    *,
    num_states: int,
    backend: str = "xla",
    platform: str = "cuda",
    adds_gradients: bool = False,
    clips: bool = False,
) -> Step:
    """Run a training step on the meta device, and note what it takes.

    Not in a process that is to train on XLA later, which cannot start after another backward.

    Args:
        model: On the meta device, in training mode, with a `loss` among what it returns.
        batch: The batch of one device, on the meta device; where devices compute parts of one step, the batch that they
            share.
        config: Precision, units, recompute, and sizes of axes along which devices compute other parts of one step. Over
            how many others it is sharded is asked of the step.
        num_states: Tensors in a parameter's shape that the optimizer keeps for it; `count_states()` tells.
        backend: One of `PLANNED_BACKENDS`.
        platform: Of the devices, `cpu`, `cuda` or `tpu`: XLA's CPU client holds bfloat16 in float32, and autocast on a
            GPU computes norms, powers and the like in float32.
        adds_gradients: Whether a step is of several batches, all but the last inside of `torchacc.accumulate()`.
        clips: Whether gradients are clipped by their norm: under XLA all of them wait for it, which is added whole.

    Raises:
        ConfigError: The model cannot run there, or the config asks for what is not planned.
    """
    _refuse_unplanned(config, PLANNED_BACKENDS[backend], adds_gradients=adds_gradients)
    chosen = PLANNED_BACKENDS[backend]
    config = deepcopy(config)
    config.dist.dp.size, config.dist.fsdp.size, config.dist.fsdp.sharding_strategy = 1, 1, "FULL_SHARD"
    num_devices = requested_devices(config)
    config = resolve(config, Job(num_processes=num_devices), num_devices=num_devices)
    mesh = from_config(config)
    if chosen.runs_eagerly:
        check_axes(config, mesh, model)
    plan = make_plan(model, config, mesh)
    batch_bytes = sum(tensor.nbytes for tensor in (*batch.values(), *model.buffers()))
    look = partial(_study_stage, model, batch, config, plan, chosen, platform=platform, adds_gradients=adds_gradients)
    devices = [DeviceStep(tuple(map(look, plan.pipeline.stages_at(place))), batch_bytes) for place in _places(plan)]
    return Step(plan, tuple(devices), num_states, chosen, clips)


def _refuse_unplanned(config: Config, backend: PlannedBackend, *, adds_gradients: bool) -> None:
    """Refuse what is not in the plan of a backend.

    Raises:
        ConfigError: The config asks for it.
    """
    attention = config.compute.attention if backend.runs_eagerly else asked_of_xla(config.compute)
    if attention in IN_BLOCKS:
        raise ConfigError(
            f"config.compute.attention = {attention!r} is not in the memory plan, which counts all scores under XLA: "
            "leave it at 'auto' to plan without it, or take `torchacc plan --compile-for`, which compiles it"
        )
    for path in _NOT_PLANNED:
        if path == "compute.scan_layers" and backend.runs_eagerly:
            continue  # it has no effect there
        if attrgetter(path)(config):
            raise ConfigError(f"config.{path} = True is not in the memory plan: leave it out to plan without it")
    if config.compute.chunked_loss and not backend.runs_eagerly:
        raise ConfigError(
            "config.compute.chunked_loss is in the memory plan of the native engine only: leave it out, to plan without"
        )
    stages = axis_with(Role.PIPELINE)
    if config.compute.chunked_loss and getattr(config.dist, stages).size > 1:
        raise ConfigError(
            f"config.compute.chunked_loss beside config.dist.{stages}.size is not in the memory plan, as what "
            "microbatches keep for backward was not shown to be right: leave it out, to plan without"
        )
    if config.dist.pp.schedule == "zero_bubble":
        raise ConfigError(
            "config.dist.pp.schedule = 'zero_bubble' is not in the memory plan: plan with '1f1b', and leave room for "
            "inputs and output gradients of linear layers, which stay longer"
        )
    if config.memory.gc_policy != "full" and not backend.runs_eagerly:
        raise ConfigError(
            f"config.memory.gc_policy = {config.memory.gc_policy!r} is in the memory plan of the native engine only: "
            "leave it at 'full', or plan for the native engine"
        )
    if adds_gradients and not backend.runs_eagerly:
        raise ConfigError(
            "a step of several batches, as training.gradient_accumulation_steps asks for, is in the memory plan of the "
            "native engine only: plan for the native engine, or for one batch in a step"
        )
    if config.memory.step_in_backward and (adds_gradients or not backend.runs_eagerly):
        why = (
            "and a step is of several batches"
            if backend.runs_eagerly
            else "in the memory plan of the native engine only"
        )
        raise ConfigError(f"config.memory.step_in_backward = True {why}: leave it out to plan without it")
    for axis in axes_with(*MODEL_PARALLEL):
        size = getattr(config.dist, axis).size
        if size > 1 and not backend.runs_eagerly:
            raise ConfigError(
                f"config.dist.{axis}.size = {size} is in the memory plan of the native engine only: leave it at 1, or "
                "plan for the native engine; or take `torchacc plan --compile-for`, which compiles it"
            )


def _places(plan: ShardingPlan) -> list[int]:
    """Return the places of the devices that may need the most: the first, the last, and the largest between them."""
    pipeline = plan.pipeline
    between = range(1, pipeline.num_devices - 1)
    largest = max(between, key=lambda place: plan.of_stages(pipeline.stages_at(place)).numel, default=0)
    return sorted({0, largest, pipeline.num_devices - 1})


def _study_stage(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    config: Config,
    plan: ShardingPlan,
    backend: PlannedBackend,
    stage: int,
    *,
    platform: str,
    adds_gradients: bool,
) -> StageStep:
    dtype, traffic = getattr(torch, plan.compute_dtype), Traffic()
    count, recomputed = 1, plan.recomputed
    if backend.runs_eagerly:
        model = on_one_device(deepcopy(model).to(dtype), plan, stage, traffic)
        batch = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    if plan.pipeline.size > 1:
        rows = len(next(iter(batch.values())))
        count, recomputed = min(rows, plan.pipeline.num_microbatches), plan.of_stages([stage]).recomputed
        batch = {name: tensor[: -(-rows // count)] for name, tensor in batch.items()}
    trace = record(
        model,
        batch,
        dtype=dtype,
        recomputed=recomputed,
        saves_matmuls=plan.saves_matmuls,
        eager=backend.runs_eagerly,
        platform=platform,
        chunked_loss=config.compute.chunked_loss,
    )
    actions = tuple(plan.pipeline.actions(stage % plan.pipeline.num_devices, count))
    lifetimes = backend.lifetimes(trace)
    lifetimes = replace(lifetimes, stage=stage, actions=actions, adds_gradients=adds_gradients)
    work = tuple((operation.flops, operation.nbytes) for operation in trace.operations)
    return StageStep(lifetimes, tuple(traffic.found), work)


def count_states(optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> int:
    """Return how many tensors in a parameter's shape an optimizer keeps for it.

    Args:
        optimizer: A class of `torch.optim`.
        options: Its arguments.

    Raises:
        ConfigError: It does not take them, or steps in another way.
    """
    parameter = nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros_like(parameter)
    try:
        made: Any = optimizer([parameter], **options)
        made.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the optimizer {optimizer.__name__} cannot be planned: {error}") from error
    return sum(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in made.state[parameter].values()
    )
