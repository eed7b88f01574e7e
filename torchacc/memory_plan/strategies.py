"""Bytes of each device for a training step, by sharding strategy: arithmetic on a plan and on what is alive when."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from torchacc.memory_plan.lifetimes import Buffer, Lifetimes
from torchacc.parallel.axes import Role
from torchacc.parallel.pipeline_plan import Action, Pass
from torchacc.parallel.plan import PlannedParameter, ShardingPlan, Unit
from torchacc.parallel.sharding import DivisibleDimLayout, LocalShard, local_shard

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class DeviceBytes:
    """What one device holds when a step needs the most, in bytes."""

    parameters: int
    """Parameters at rest."""
    optimizer: int
    """Optimizer state at rest."""
    gathered: int
    """Unsharded weights, and copies of weights."""
    gradients: int
    """Gradients, and what they are summed into over the devices."""
    activations: int
    """All else: what forward keeps for backward, the batch, and the model's buffers."""

    @property
    def total(self) -> int:
        """The sum of it all."""
        return self.parameters + self.optimizer + self.gathered + self.gradients + self.activations


@dataclass(frozen=True)
class _Interval:
    kind: str
    nbytes: int
    start: int
    stop: int
    is_one: bool = False
    """Whether all microbatches have it in common, from the first of them to the last."""
    is_last: bool = False
    """Whether it is there in the backward of the last microbatch only."""


def xla_bytes(plan: ShardingPlan, stages: Sequence[Lifetimes], num_states: int, batch_bytes: int) -> DeviceBytes:
    """Return what XLA plans for a device: one program holds the whole step."""
    (lifetimes,) = stages
    master = DTYPE_BYTES[plan.master_dtype]
    at_rest = sum(_partition(plan, parameter).shard_numel for parameter in plan.parameters)
    trained = sum(_partition(plan, parameter).shard_numel for parameter in plan.parameters if parameter.trainable)
    intervals = [_Interval("activations", _size(plan, b), b.birth, b.death) for b in lifetimes.buffers]
    in_shards = {buffer.lookup_of for buffer in lifetimes.buffers if not buffer.joins_another}
    for unit in plan.units:
        again = plan.is_resharded_after_forward(unit)
        for parameter in unit.parameters:
            intervals += _weight(plan, parameter, lifetimes, master, again=again)
            added = plan.mesh.num_shards > 1 and parameter.name in in_shards
            intervals += _gradient(plan, parameter, lifetimes, num_states, added=added)
    intervals += _copies(plan, lifetimes, master)
    peak = _peak(intervals)
    return DeviceBytes(
        parameters=at_rest * master,
        optimizer=trained * master * num_states,
        gathered=peak["gathered"],
        gradients=peak["gradients"],
        activations=peak["activations"] + batch_bytes,
    )


def _size(plan: ShardingPlan, buffer: Buffer) -> int:
    """Return what a buffer takes: a lookup's gradient is added into the shard, or into what is there of it."""
    if buffer.lookup_of is None or not buffer.nbytes:
        return buffer.nbytes
    if buffer.joins_another and not plan.mesh.averages_gradients:
        return 0
    parameter = next(each for each in plan.parameters if each.name == buffer.lookup_of)
    return buffer.nbytes * _partition(plan, parameter).shard_numel // parameter.numel


def native_bytes(plan: ShardingPlan, stages: Sequence[Lifetimes], num_states: int, batch_bytes: int) -> DeviceBytes:
    """Return what PyTorch's FSDP holds on a device, each operation a kernel of its own.

    Gradients stay from backward to the optimizer's step, which makes one more tensor for each parameter meanwhile; or
    each weight steps inside of backward.

    Args:
        plan: Of what the device computes.
        stages: What is alive in the step of one microbatch through each of its stages.
        num_states: Tensors in a parameter's shape that the optimizer keeps for it.
        batch_bytes: Of the batch, and of the model's buffers.
    """
    master = DTYPE_BYTES[plan.master_dtype]
    at_rest = sum(shard_numel(plan, parameter) for parameter in plan.parameters)
    trained = sum(shard_numel(plan, parameter) for parameter in plan.parameters if parameter.trainable) * master
    timeline = _Timeline.of(stages)
    meanwhile = trained if num_states and not plan.steps_in_backward else 0
    intervals = [_Interval("optimizer", meanwhile, timeline.end, timeline.end)]
    for lifetimes in stages:
        own = plan.of_stages([lifetimes.stage]) if len(stages) > 1 else plan
        of_microbatch = [_Interval("activations", b.nbytes, b.birth, b.death) for b in lifetimes.buffers]
        of_microbatch += _unit_weights(own, lifetimes)
        of_microbatch += _unit_gradients(own, lifetimes)
        intervals += timeline.repeated(of_microbatch, lifetimes)
    peak = _peak(intervals)
    return DeviceBytes(
        parameters=at_rest * master,
        optimizer=trained * num_states + peak["optimizer"],
        gathered=peak["gathered"],
        gradients=peak["gradients"],
        activations=peak["activations"] + batch_bytes,
    )


def _unit_weights(plan: ShardingPlan, lifetimes: Lifetimes) -> Iterator[_Interval]:
    """Yield when a unit is unsharded, which `fully_shard` has beside the shards, unless these are the full weights."""
    if plan.is_replicated:
        return
    turn = lifetimes.num_forward
    uses = {
        unit: sorted(use for parameter in unit.parameters for use in lifetimes.uses.get(parameter.name, ()))
        for unit in plan.units
    }
    begins = {unit: min((use for use in uses[unit] if use >= turn and unit.name), default=turn) for unit in plan.units}
    for unit, times in uses.items():
        if not times or _has_full_shards(plan, unit):
            continue
        nbytes = sum(computed_numel(plan, unit, each) for each in unit.parameters) * DTYPE_BYTES[plan.compute_dtype]
        ends = max([times[-1], *(lifetimes.gradients.get(parameter.name, 0) for parameter in unit.parameters)])
        if not plan.is_resharded_after_forward(unit) or plan.pipeline.runs_backward_early:
            yield _Interval("gathered", nbytes, times[0], ends, is_one=True)
            continue
        # In backward a unit is gathered when the one that comes before it begins.
        ahead = max((time for time in begins.values() if time < begins[unit]), default=begins[unit])
        forward_ends = max((time for time in times if time < turn), default=times[0])
        yield _Interval("gathered", nbytes, times[0], forward_ends, is_one=True)
        yield _Interval("gathered", nbytes, ahead if plan.backward_prefetch else begins[unit], ends, is_one=True)


def _unit_gradients(plan: ShardingPlan, lifetimes: Lifetimes) -> Iterator[_Interval]:
    """Yield when gradients are unsharded, in the buffer in which those of a unit are summed, and sharded."""
    if plan.is_replicated:
        yield from _plain_gradients(plan, lifetimes)
        return
    compute, reduced = DTYPE_BYTES[plan.compute_dtype], DTYPE_BYTES[plan.reduce_dtype]
    trained = [[each for each in unit.parameters if each.name in lifetimes.gradients] for unit in plan.units]
    complete = [max((lifetimes.gradients[each.name] for each in unit), default=0) for unit in trained]
    in_turn, end = plan.pipeline.runs_backward_early, lifetimes.num_operations
    for unit, parameters, done in zip(plan.units, trained, complete, strict=True):
        numels = [computed_numel(plan, unit, each) for each in parameters]
        is_reduced = reduced != compute or plan.mesh.size(Role.REPLICATE, Role.EXPERT) > 1
        is_shard = _has_full_shards(plan, unit) and not is_reduced
        # Gradients are reduced after the last microbatch, and until then summed as they will be reduced.
        adds = lifetimes.adds_gradients and not in_turn
        sums_up = lifetimes.num_microbatches > 1 or adds
        casts = sums_up and bool(unit.name) and reduced != compute
        for parameter, numel in zip(parameters, numels, strict=True):
            time = lifetimes.gradients[parameter.name]
            birth = 0 if adds and not casts else time
            ends = end if is_shard and not (plan.steps_in_backward or in_turn) else done
            yield _Interval("gradients", numel * compute, birth, ends, is_one=sums_up and not casts)
            if casts:
                yield _Interval("gradients", numel * reduced, 0 if adds else done, done, is_one=True)
            elif sums_up:
                yield _Interval("gradients", numel * compute, time, time)
        following = min((time for time in complete if time > done), default=done)
        if plan.mesh.size(Role.SHARD, Role.REPLICATE) > 1:
            yield _Interval("gradients", sum(numels) * reduced, done, following, is_last=True)
        shards = sum(shard_numel(plan, parameter) for parameter in parameters) * DTYPE_BYTES[plan.master_dtype]
        if plan.steps_in_backward:  # one tensor more for the largest weight while that steps
            largest = max((shard_numel(plan, each) for each in parameters), default=0) * DTYPE_BYTES[plan.master_dtype]
            yield _Interval("gradients", shards + largest, done, done, is_last=True)
            continue
        if not is_shard or in_turn:
            yield _Interval("gradients", shards, done, end, is_last=True)
        if in_turn and lifetimes.adds_gradients:  # to those of the parameters, when the script calls backward
            yield _Interval("gradients", shards, 0, end - 1, is_one=True)


def _plain_gradients(plan: ShardingPlan, lifetimes: Lifetimes) -> Iterator[_Interval]:
    """Yield when there are gradients of parameters that are not sharded, and in backward the buckets of their sums."""
    end = max(lifetimes.gradients.values(), default=0)
    for parameter in plan.parameters:
        if parameter.name in lifetimes.gradients:
            birth, nbytes = lifetimes.gradients[parameter.name], parameter.numel * DTYPE_BYTES[plan.master_dtype]
            first = 0 if lifetimes.adds_gradients else birth
            last = birth + 1 if plan.steps_in_backward else lifetimes.num_operations
            yield _Interval("gradients", nbytes, first, last, is_one=True)
            if plan.steps_in_backward:
                yield _Interval("gradients", nbytes, last, last)
            if lifetimes.adds_gradients:
                yield _Interval("gradients", nbytes, birth, birth)
            if plan.mesh.averages_gradients:
                yield _Interval("gradients", nbytes, birth, end)


@dataclass(frozen=True)
class _Timeline:
    """When a device runs the forwards and backwards of its stages."""

    begins: Mapping[Action, int]
    last: Action
    """The last backward, after which gradients of the stages before it are reduced, too."""
    done: int
    """When that is over."""
    end: int
    """The optimizer's step."""

    @classmethod
    def of(cls, stages: Sequence[Lifetimes]) -> "_Timeline":
        """Return the timeline of a device from the lifetimes of its stages."""
        by_stage, actions = {each.stage: each for each in stages}, stages[0].actions
        lengths = [
            own.num_forward if action.kind is Pass.FORWARD else own.num_operations - own.num_forward
            for action in actions
            for own in [by_stage[action.stage]]
        ]
        *begins, done = accumulate(lengths, initial=0)
        late = max(lengths) if len(stages) > 1 else 0
        return cls(dict(zip(actions, begins, strict=True)), actions[-1], done, done + late)

    def repeated(self, intervals: Iterable[_Interval], own: Lifetimes) -> Iterator[_Interval]:
        """Yield the intervals of all microbatches through a stage.

        Args:
            intervals: Of one of them.
            own: The stage's lifetimes.
        """
        numbers = [number for kind, stage, number in self.begins if (kind, stage) == (Pass.BACKWARD, own.stage)]
        for each in intervals:
            if each.is_last:
                last = numbers[-1] if own.stage == self.last.stage else None
                yield replace(each, start=self._at(each.start, last, own), stop=self._at(each.stop, last, own))
            elif each.is_one:
                starts, stops = ([self._at(time, n, own) for n in numbers] for time in (each.start, each.stop))
                if own.stage != self.last.stage and each.stop >= own.num_forward:  # until gradients are reduced
                    stops.append(self._at(each.stop, None, own))
                yield replace(each, start=min(starts), stop=max(stops))
            else:
                for number in numbers:
                    yield replace(each, start=self._at(each.start, number, own), stop=self._at(each.stop, number, own))

    def _at(self, time: int, number: int | None, own: Lifetimes) -> int:
        """Return when that is for one of the microbatches; for None after all of them."""
        if time == own.num_operations:
            return self.end
        if time < own.num_forward:
            return self.begins[Action(Pass.FORWARD, own.stage, number or 0)] + time
        after_forward = time - own.num_forward
        if number is None:
            return self.done + after_forward
        return self.begins[Action(Pass.BACKWARD, own.stage, number)] + after_forward


def _local(plan: ShardingPlan, parameter: PlannedParameter) -> LocalShard:
    """Return what the first device has of a parameter natively, which is as much as any has."""
    spec = plan.tensor_parallel.spec_of(parameter.name)
    return local_shard(parameter.name, parameter.shape, plan.mesh, 0, spec)


def shard_numel(plan: ShardingPlan, parameter: PlannedParameter) -> int:
    """Return how many elements of a parameter a device holds at rest natively, padding included."""
    return _local(plan, parameter).shard_numel


def computed_numel(plan: ShardingPlan, unit: Unit, parameter: PlannedParameter) -> int:
    """Return how many elements of a parameter a device computes with natively: its part of the layer, its experts."""
    experts = next((each for each in plan.experts if each.module == unit.name), None)
    if experts is not None:
        return parameter.numel * experts.num_held // experts.num_experts
    within = _local(plan, parameter).within
    return parameter.numel if within is None else prod(within.part_shape(parameter.shape))


def _has_full_shards(plan: ShardingPlan, unit: Unit) -> bool:
    """Return whether a device computes with its shards themselves, as no other has a part of what they are of."""
    is_shared = plan.mesh.size(Role.SHARD) > 1 and not any(each.module == unit.name for each in plan.experts)
    gathers_others = plan.shards_on_host or (plan.float8 is not None and plan.float8.are_gathered)
    if is_shared or gathers_others or plan.compute_dtype != plan.master_dtype:
        return False
    return all(computed_numel(plan, unit, each) == shard_numel(plan, each) for each in unit.parameters)


def _partition(plan: ShardingPlan, parameter: PlannedParameter) -> DivisibleDimLayout:
    """Return how XLA shards a parameter."""
    return DivisibleDimLayout(parameter.shape, plan.mesh.num_shards)


def _weight(
    plan: ShardingPlan, parameter: PlannedParameter, lifetimes: Lifetimes, itemsize: int, *, again: bool
) -> Iterator[_Interval]:
    """Yield when a weight is unsharded, beside its shard, and when that is there in the dtype of products."""
    dim, uses = _partition(plan, parameter).dim, lifetimes.uses.get(parameter.name, ())
    if not uses:
        return
    cast = lifetimes.casts.get(parameter.name)
    if cast is not None:  # of the shard it is the same in forward and in backward, where that is gathered for both
        last = uses[0] if dim is not None and not again else uses[-1]
        yield _Interval("gathered", cast * _partition(plan, parameter).shard_numel // parameter.numel, uses[0], last)
    if dim is None:
        return
    nbytes = parameter.numel * itemsize if cast is None else cast
    # Gathered along another dimension it is laid out anew, and where no dtype is lower it is rounded anew.
    copies = 2 if dim > 0 or cast == parameter.numel * itemsize else 1
    if not again:
        backward = [use for use in uses if use >= lifetimes.num_forward]
        yield _Interval("gathered", nbytes, uses[0], backward[0] + 1 if backward else uses[-1])
    for use in uses:
        if again or copies > 1:
            yield _Interval("gathered", nbytes if not again else copies * nbytes, use, use + 1)


def _gradient(
    plan: ShardingPlan, parameter: PlannedParameter, lifetimes: Lifetimes, num_states: int, *, added: bool
) -> Iterator[_Interval]:
    """Yield what a gradient takes: itself is among the buffers, as an operation makes it, or added into the shard."""
    if parameter.name not in lifetimes.gradients:
        return
    time, master = lifetimes.gradients[parameter.name], DTYPE_BYTES[plan.master_dtype]
    if plan.mesh.averages_gradients and not added:
        yield _Interval("gradients", parameter.numel * 4, time, time)
    # The new state is written beside the old one, and all parameters are stepped at the end.
    late = max(0, num_states - 1) * _partition(plan, parameter).shard_numel * master
    yield _Interval("gradients", late, time + 1, lifetimes.num_operations)


def _copies(plan: ShardingPlan, lifetimes: Lifetimes, itemsize: int) -> Iterator[_Interval]:
    """Yield the copies of shards that XLA makes of what it overwrites: each in the place of the one before it."""
    seen: Counter[tuple[int, ...]] = Counter()
    for parameter in plan.parameters:
        if len(parameter.shape) > 1 and parameter.name in lifetimes.gradients:
            seen[parameter.shape] += 1
            if seen[parameter.shape] <= 2:
                uses = lifetimes.uses.get(parameter.name, (0,))
                nbytes = _partition(plan, parameter).shard_numel * itemsize
                yield _Interval("gathered", nbytes, uses[0], lifetimes.gradients[parameter.name])


def _peak(intervals: Iterable[_Interval]) -> Counter[str]:
    """Return the bytes of each kind when all together are the most."""
    changes: dict[int, Counter[str]] = {}
    for interval in intervals:
        changes.setdefault(interval.start, Counter())[interval.kind] += interval.nbytes
        changes.setdefault(interval.stop + 1, Counter())[interval.kind] -= interval.nbytes
    now, most, best = Counter[str](), 0, Counter[str]()
    for time in sorted(changes):
        now.update(changes[time])
        if now.total() > most:
            most, best = now.total(), Counter(now)
    return best
