"""An estimate of a step's time on a layout: what is computed, what is sent while nothing is, and idle stages.

Times are of the device that takes longest. They rank layouts; they are not a promise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from statistics import mean

from torchacc.layouts.speeds import DeviceSpeeds
from torchacc.memory_plan.step import DeviceStep, Step
from torchacc.memory_plan.strategies import DTYPE_BYTES, computed_numel, shard_numel
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import ShardingPlan, Unit


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    """All that a device computes."""
    exposed: float
    """What it sends while it does not compute."""
    bubble: float
    """What stages wait for one another."""

    @property
    def total(self) -> float:
        """The sum of it all."""
        return self.compute + self.exposed + self.bubble


def estimate(step: Step, plan: ShardingPlan, speeds: DeviceSpeeds) -> StepTime:
    """Return how long a step takes.

    Args:
        step: What is known of it.
        plan: The plan on all devices, as `step.plan_on()` returns it.
        speeds: The devices'.
    """
    times = [_of_device(each, plan, speeds, step.num_states) for each in step.devices]
    slowest = max(times, key=lambda time: time.total)
    return slowest if speeds.devices_per_processor == 1 else _on_shared_processors(times, slowest, speeds)


def _on_shared_processors(times: Sequence[StepTime], slowest: StepTime, speeds: DeviceSpeeds) -> StepTime:
    """Return how long it takes where a device that waits leaves its processor to others.

    A step then takes what all have to do, or what the slowest device takes that has a processor to itself.
    """
    compute, exposed = mean(each.compute for each in times), mean(each.exposed for each in times)
    alone = slowest.total / speeds.devices_per_processor
    return StepTime(compute, exposed, bubble=max(0.0, alone - compute - exposed))


def _of_device(device: DeviceStep, plan: ShardingPlan, speeds: DeviceSpeeds, num_states: int) -> StepTime:
    count = device.stages[0].lifetimes.num_microbatches
    own = device.plan_of(plan)
    computed = _computed(device, speeds, plan.compute_dtype)
    exchanges = [each for stage in device.stages for each in stage.sent]
    sent = sum(_seconds(plan.mesh, plan.mesh.axes(each.role), each.nbytes, speeds) for each in exchanges)
    moved = sum(_seconds(plan.mesh, axes, nbytes, speeds) for axes, nbytes in _of_parameters(own, speeds))
    # A stage gathers its weights, and reduces its gradients, once for all microbatches.
    exchanged = max(0.0, moved - count * computed) if speeds.overlaps else moved
    # FSDP copies what it has gathered into each weight, and each gradient into what it sends.
    copied = 2 * sum(_copied(own, unit) for unit in own.units) / speeds.memory_bytes_per_second
    # Each microbatch but the first adds its gradients: two are read, and their sum is written.
    gradients = sum(_numel(own, unit) for unit in own.units) * DTYPE_BYTES[plan.reduce_dtype]
    added = 3 * (count - 1) * gradients / speeds.memory_bytes_per_second
    # The optimizer reads each shard of parameters, gradients and its state once, and writes parameters and state.
    at_rest = sum(shard_numel(own, parameter) for parameter in own.parameters) * DTYPE_BYTES[plan.master_dtype]
    stepped = (3 + 2 * num_states) * at_rest / speeds.memory_bytes_per_second
    return StepTime(
        compute=count * computed + copied + added + stepped,
        exposed=count * sent + exchanged,
        bubble=(plan.pipeline.num_devices - 1) * (computed + sent) / len(device.stages),
    )


def _computed(device: DeviceStep, speeds: DeviceSpeeds, dtype: str) -> float:
    """Return what the operations of a microbatch take: a host calls each of them, and a device runs it."""
    flops = speeds.flops_per_second * speeds.efficiency
    flops *= speeds.float32_share if dtype == "float32" else 1
    work = [each for stage in device.stages for each in stage.work]
    run = sum(max(done / flops, nbytes / speeds.memory_bytes_per_second) for done, nbytes in work)
    called = len(work) * speeds.seconds_per_operation
    return max(run, called) if speeds.overlaps else run + called


def _of_parameters(plan: ShardingPlan, speeds: DeviceSpeeds) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield what a step sends of each unit, and along which axes: its weights once or twice, and its gradients."""
    mesh = plan.mesh
    replicas = mesh.size(Role.REPLICATE)
    for unit in plan.units:
        axes, shards, numel = _gathered_along(plan, unit), _shards(plan, unit), _numel(plan, unit)
        if numel and shards > 1:
            *gathered, reduced = _itemsizes(plan, unit)
            for itemsize in (*gathered, reduced if speeds.scatters else 2 * reduced):
                yield axes, numel * itemsize * (shards - 1) // shards
        if numel and replicas > 1:
            each = numel * DTYPE_BYTES[plan.reduce_dtype] // shards
            yield mesh.axes(Role.REPLICATE), 2 * each * (replicas - 1) // replicas


def _copied(plan: ShardingPlan, unit: Unit) -> int:
    """Return how many bytes of a unit a step copies out of what it gathers, and into what it reduces."""
    return _numel(plan, unit) * sum(_itemsizes(plan, unit)) if _shards(plan, unit) > 1 else 0


def _itemsizes(plan: ShardingPlan, unit: Unit) -> list[int]:
    """Return the bytes of an element each time that a unit is exchanged over its shards: to gather, and to reduce."""
    gathers = 2 if plan.is_resharded_after_forward(unit) else 1
    return [*[DTYPE_BYTES[plan.compute_dtype]] * gathers, DTYPE_BYTES[plan.reduce_dtype]]


def _numel(plan: ShardingPlan, unit: Unit) -> int:
    return sum(computed_numel(plan, unit, parameter) for parameter in unit.parameters)


def _shards(plan: ShardingPlan, unit: Unit) -> int:
    return prod(plan.mesh.axis_size(axis) for axis in _gathered_along(plan, unit))


def _gathered_along(plan: ShardingPlan, unit: Unit) -> tuple[str, ...]:
    """Return the axes along which a unit is sharded; experts that are spread are, over the devices with the same."""
    axes = plan.mesh.axes(Role.SHARD)
    if any(experts.module == unit.name for experts in plan.experts):
        axes = tuple(axis for axis in axes if axis not in plan.mesh.axes(Role.EXPERT))
    return axes


def _seconds(mesh: Mesh, axes: tuple[str, ...], nbytes: int, speeds: DeviceSpeeds) -> float:
    is_near = _is_near(mesh, axes, speeds.devices_per_machine)
    rate = speeds.near_bytes_per_second if is_near else speeds.far_bytes_per_second
    return nbytes / rate + speeds.seconds_per_exchange


@cache
def _is_near(mesh: Mesh, axes: tuple[str, ...], devices_per_machine: int) -> bool:
    """Return whether no group of devices along these axes lies on several machines."""
    groups = mesh.groups_along(axes)
    return all(min(group) // devices_per_machine == max(group) // devices_per_machine for group in groups)
