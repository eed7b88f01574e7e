"""Which stage of a pipeline has what: plain data, no device."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import schedules

from torchacc.config import Config
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.pipeline_plan import (
    Action,
    Pass,
    _balanced,
    all_forwards_first,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from torchacc.parallel.plan import ShardingPlan, make_plan

PASSES = (Pass.FORWARD, Pass.BACKWARD)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


class Model(nn.Module):
    def __init__(self, *, layers: int = 5, vocab: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan(model: nn.Module, stages: int = 2, **options) -> ShardingPlan:
    config = Config.from_dict({"dist": {"pp": {"size": stages, **options.pop("pp", {})}}, **options})
    return make_plan(model, config, Mesh((("fsdp", 1), ("pp", stages))))


def test_stages_are_runs_of_layers_with_what_is_around_them_at_the_ends():
    model = Model()
    planned = plan(model, memory={"gc": True})
    stages = [planned.of_stages([stage]) for stage in range(2)]
    assert [stage.recomputed for stage in stages] == [("layers.0", "layers.1", "layers.2"), ("layers.3", "layers.4")]
    names = [[parameter.name for parameter in stage.parameters] for stage in stages]
    assert names[0][-3:] == ["layers.2.inner.weight", "layers.2.inner.bias", "embed.weight"]
    assert names[1][-3:] == ["embed.weight", "norm.weight", "norm.bias"], "the tied weight is in both"
    assert {name for own in names for name in own} == {name for name, _ in model.named_parameters()}
    assert str(planned).splitlines()[-4:-1] == [
        "  stage 0: layers.0 to layers.2, embed",
        "  stage 1: layers.3 to layers.4, norm, head",
        "  batches split into 4 microbatches, gpipe",
    ]


def test_a_large_table_has_few_layers_beside_it():
    assert plan(Model(vocab=64, tied=False)).pipeline.bounds == (0, 3, 5)
    assert plan(Model(vocab=64), stages=3).pipeline.bounds == (0, 1, 4, 5)
    assert plan(Model(), pp={"num_microbatches": 7}).pipeline.num_microbatches == 7


def test_a_device_has_several_stages_when_they_are_interleaved():
    planned = plan(Model(layers=8, vocab=1), pp={"schedule": "interleaved"})
    pipeline = planned.pipeline
    assert [list(pipeline.stages_at(place)) for place in range(2)] == [[0, 2], [1, 3]]
    lines = [line for line in str(planned).splitlines() if line.startswith(("  stage", "  batches"))]
    assert lines == [
        "  stage 0 on device 0 of 2: layers.0 to layers.1, embed",
        "  stage 1 on device 1 of 2: layers.2 to layers.3",
        "  stage 2 on device 0 of 2: layers.4 to layers.5",
        "  stage 3 on device 1 of 2: layers.6 to layers.7, norm, head",
        "  batches split into 4 microbatches, interleaved",
    ]
    names = [parameter.name for parameter in planned.of_stages(pipeline.stages_at(0)).parameters]
    assert {name.split(".")[1] for name in names if name.startswith("layers")} == {"0", "1", "4", "5"}
    assert pipeline.places_of(["embed.weight", "head.weight"]) == (0, 1)
    assert " ".join(map(str, pipeline.actions(1, 2))) == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert plan(Model(layers=8, vocab=1), pp={"schedule": "interleaved", "stages_per_device": 4}).pipeline.size == 8


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_stage_holds_no_more_microbatches_than_there_are_stages_behind_it(size, count):
    devices = [one_forward_one_backward(stage, size, count) for stage in range(size)]
    for stage, actions in enumerate(devices):
        of_forwards, of_backwards = ([a.number for a in actions if a.kind is kind] for kind in PASSES)
        assert of_forwards == of_backwards == list(range(count))
        assert most_held(actions) == min(size - stage, count)
    assert runs_to_its_end(devices, size, size)
    assert runs_to_its_end([all_forwards_first(stage, count) for stage in range(size)], size, size)


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_stage_that_splits_backwards_holds_no_more_microbatches_than_there_are_stages(size, count):
    devices = [zero_bubble(stage, size, count) for stage in range(size)]
    for stage, actions in enumerate(devices):
        without = [action for action in actions if action.kind is not Pass.WEIGHTS]
        assert without == one_forward_one_backward(stage, size, count)
        assert [action.number for action in actions if action.kind is Pass.WEIGHTS] == list(range(count))
        for number in range(count):
            passes = [action.kind for action in actions if action.number == number]
            assert passes == [Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHTS]
        ends = accumulate({Pass.FORWARD: 1, Pass.BACKWARD: 0, Pass.WEIGHTS: -1}[action.kind] for action in actions)
        assert max(ends) == min(size, count)


@given(st.integers(1, 8), st.integers(1, 20))
def test_a_split_backward_leaves_a_third_of_the_waiting(size, more):
    count = size + more
    assert time_of([one_forward_one_backward(stage, size, count) for stage in range(size)]) == 3 * (count + size - 1)
    assert time_of([zero_bubble(stage, size, count) for stage in range(size)]) == 3 * count + size - 1


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 17))
def test_interleaved_stages_run_all_microbatches_in_order_and_to_their_end(size, each, count):
    devices = [interleaved(range(place, size * each, size), size, count) for place in range(size)]
    for place, actions in enumerate(devices):
        assert Counter(actions) == Counter(
            Action(kind, stage, number)
            for kind in PASSES
            for stage in range(place, size * each, size)
            for number in range(count)
        )
        for stage in range(place, size * each, size):
            for kind in PASSES:
                assert [a.number for a in actions if (a.kind, a.stage) == (kind, stage)] == list(range(count))
        together = -(-count // max(1, count // size))
        assert most_held(actions) <= min(count * each, (each - 1) * together + 2 * (size - 1 - place) + 1)
    assert runs_to_its_end(devices, size * each, size)


@given(st.integers(2, 5), st.integers(2, 3), st.integers(1, 4))
def test_interleaved_stages_run_in_the_order_of_pytorchs_own_schedule(size, each, rounds):
    theirs = schedules.ScheduleInterleaved1F1B
    how = {"pp_group_size": size, "n_local_stages": each, "_n_microbatches": rounds * size}
    own = SimpleNamespace(**how, microbatches_per_round=size)
    for place in range(size):
        order = filter(None, theirs._calculate_single_rank_operations(own, place))
        kinds = {schedules.FORWARD: Pass.FORWARD, schedules.FULL_BACKWARD: Pass.BACKWARD}
        expected = [Action(kinds[a.computation_type], a.stage_index, a.microbatch_index) for a in order]
        assert interleaved(range(place, size * each, size), size, rounds * size) == expected


def time_of(devices: Sequence[Sequence[Action]]) -> int:
    """Return when all have run, where each half of a backward takes as long as a forward, and sending takes no time."""
    is_split = any(action.kind is Pass.WEIGHTS for actions in devices for action in actions)
    ends: dict[Action, int] = {}
    left, now = [list(actions) for actions in devices], [0] * len(devices)
    while any(left):
        for place, actions in enumerate(left):
            while actions:
                action = actions[0]
                step = {Pass.FORWARD: -1, Pass.BACKWARD: 1, Pass.WEIGHTS: None}[action.kind]
                source = None if step is None else action._replace(stage=action.stage + step)
                is_needed = source is not None and 0 <= source.stage < len(devices)
                if is_needed and source not in ends:
                    break
                takes = 2 if action.kind is Pass.BACKWARD and not is_split else 1
                now[place] = max(now[place], ends[source] if is_needed else 0) + takes
                ends[actions.pop(0)] = now[place]
    return max(now)


def most_held(actions: Sequence[Action]) -> int:
    return max(accumulate(1 if action.kind is Pass.FORWARD else -1 for action in actions))


def runs_to_its_end(devices: Sequence[Sequence[Action]], num_stages: int, most_sent: int) -> bool:
    """Return whether no device waits forever, as each waits for what others send, and until they receive."""
    computed, received = set[Action](), set[Action]()
    left, sent = [list(actions) for actions in devices], [list[Action]() for _ in devices]

    def goes_on(place: int) -> bool:
        """Begin the next action, or end it once no more than so many of its stage wait to be received."""
        action = left[place][0]
        step = 1 if action.kind is Pass.FORWARD else -1
        source, target = action.stage - step, action.stage + step
        if action not in computed:
            needed = action._replace(stage=source)
            if 0 <= source < num_stages and needed not in computed:
                return False
            received.add(needed)
            computed.add(action)
            sent[place] += [action] if 0 <= target < num_stages else []
            return True
        alike = [each for each in sent[place] if each[:2] == action[:2]]
        if alike[-1:] == [action] and len(alike) > most_sent and alike[-1 - most_sent] not in received:
            return False
        left[place].pop(0)
        return True

    while any(left):
        if not any(goes_on(place) for place, actions in enumerate(left) if actions):
            return False
    return True


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 5))
def test_the_largest_run_is_the_smallest_that_can_be(weights, size):
    size = min(size, len(weights))
    bounds = _balanced(weights, size)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), size + 1)

    def largest(starts: tuple[int, ...]) -> int:
        assert all(start < stop for start, stop in pairwise(starts))
        return max(sum(weights[start:stop]) for start, stop in pairwise(starts))

    def every(left: int, begin: int) -> list[tuple[int, ...]]:
        if left == 1:
            return [(begin, len(weights))]
        return [(begin, *rest) for stop in range(begin + 1, len(weights) - left + 2) for rest in every(left - 1, stop)]

    assert largest(bounds) == min(map(largest, every(size, 0)))


def test_what_belongs_to_no_stage_or_to_several_is_refused():
    lone, shared, around = nn.Linear(4, 4), Model(), Model()
    shared.layers[4].inner = shared.layers[0].inner
    around.scale = nn.Parameter(nn.Linear(1, 1).weight.detach())
    for model, stages, expected in (
        (lone, 2, "has no list of layers"),
        (Model(layers=2), 3, "choose at most 2 stages"),
        (shared, 2, "one parameter, which several stages would share"),
        (around, 2, "belong to no stage"),
    ):
        with pytest.raises(ConfigError, match=expected):
            plan(model, stages)
