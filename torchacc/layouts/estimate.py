"""An estimate of a step's time on a layout: what is computed, what is sent while nothing is, and idle stages.

Times are of the device that takes longest. They rank layouts; they are no promise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from torchacc.layouts.speeds import DeviceSpeeds
from torchacc.memory_plan.step import DeviceStep, Step
from torchacc.memory_plan.strategies import DTYPE_BYTES, computed_numel, shard_numel
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import ShardingPlan


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
    times = [_of_device(each, plan, speeds) for each in step.devices]
    return max(times, key=lambda time: time.total)


def _of_device(device: DeviceStep, plan: ShardingPlan, speeds: DeviceSpeeds) -> StepTime:
    count = device.stages[0].lifetimes.num_microbatches
    own = device.plan_of(plan)
    work = [each for stage in device.stages for each in stage.work]
    flops = speeds.flops_per_second * speeds.efficiency
    flops *= speeds.float32_share if plan.compute_dtype == "float32" else 1
    computed = sum(max(done / flops, nbytes / speeds.memory_bytes_per_second) for done, nbytes in work)
    exchanges = [each for stage in device.stages for each in stage.sent]
    sent = sum(_seconds(plan.mesh, plan.mesh.axes(each.role), each.nbytes, speeds) for each in exchanges)
    moved = sum(_seconds(plan.mesh, axes, nbytes, speeds) for axes, nbytes in _of_parameters(own))
    # A stage gathers its weights, and reduces its gradients, once for all microbatches.
    exchanged = max(0.0, moved - count * computed) if speeds.overlaps else moved
    # The optimizer reads and writes each shard: parameters, gradients and its state.
    at_rest = sum(shard_numel(own, parameter) for parameter in own.parameters) * DTYPE_BYTES[plan.master_dtype]
    stepped = 12 * at_rest / speeds.memory_bytes_per_second
    return StepTime(
        compute=count * computed + stepped,
        exposed=count * sent + exchanged,
        bubble=(plan.pipeline.num_devices - 1) * (computed + sent) / len(device.stages),
    )


def _of_parameters(plan: ShardingPlan) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield what a step sends of each unit, and along which axes: its weights once or twice, and its gradients."""
    mesh, spread = plan.mesh, {experts.module for experts in plan.experts}
    replicas = mesh.size(Role.REPLICATE)
    for unit in plan.units:
        axes = mesh.axes(Role.SHARD)
        if unit.name in spread:  # gathered by the devices that have the same experts
            axes = tuple(axis for axis in axes if axis not in mesh.axes(Role.EXPERT))
        shards = prod(mesh.axis_size(axis) for axis in axes)
        numel = sum(computed_numel(plan, unit, parameter) for parameter in unit.parameters)
        if numel and shards > 1:
            gathers = 2 if plan.is_resharded_after_forward(unit) else 1
            for itemsize in (*[DTYPE_BYTES[plan.compute_dtype]] * gathers, DTYPE_BYTES[plan.reduce_dtype]):
                yield axes, numel * itemsize * (shards - 1) // shards
        if numel and replicas > 1:
            each = numel * DTYPE_BYTES[plan.reduce_dtype] // shards
            yield mesh.axes(Role.REPLICATE), 2 * each * (replicas - 1) // replicas


def _seconds(mesh: Mesh, axes: tuple[str, ...], nbytes: int, speeds: DeviceSpeeds) -> float:
    is_near = _is_near(mesh, axes, speeds.devices_per_machine)
    rate = speeds.near_bytes_per_second if is_near else speeds.far_bytes_per_second
    return nbytes / rate + speeds.seconds_per_exchange


@cache
def _is_near(mesh: Mesh, axes: tuple[str, ...], devices_per_machine: int) -> bool:
    """Return whether no group of devices along these axes lies on several machines."""
    groups = mesh.groups_along(axes)
    return all(min(group) // devices_per_machine == max(group) // devices_per_machine for group in groups)
