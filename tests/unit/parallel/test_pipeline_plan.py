"""Which stage of a pipeline has what: plain data, no device."""

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchacc.config import Config
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.pipeline_plan import Pass, _balanced, all_forwards_first, one_forward_one_backward
from torchacc.parallel.plan import ShardingPlan, make_plan


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
    stages = [planned.of_stage(stage) for stage in range(2)]
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


@given(st.integers(1, 6), st.integers(1, 9))
def test_a_stage_holds_no_more_microbatches_than_there_are_stages_behind_it(size, count):
    sent = []
    for stage in range(size):
        passes = list(one_forward_one_backward(stage, size, count))
        of_forwards, of_backwards = ([n for each, n in passes if each is kind] for kind in Pass)
        assert of_forwards == of_backwards == list(range(count))
        held = itertools.accumulate(1 if each is Pass.FORWARD else -1 for each, _ in passes)
        assert max(held) == min(size - stage, count)
        sent.append(passes)
    assert runs_to_its_end(sent)
    assert runs_to_its_end([all_forwards_first(count)] * size)


def runs_to_its_end(stages) -> bool:
    """Return whether no stage waits forever, where each waits for what the stage beside it sends."""
    done, left = set(), [list(passes) for passes in stages]
    while any(left):
        ready = []
        for stage, passes in enumerate(left):
            if not passes:
                continue
            kind, number = passes[0]
            source = stage - 1 if kind is Pass.FORWARD else stage + 1
            if not 0 <= source < len(stages) or (source, kind, number) in done:
                ready.append(stage)
        if not ready:
            return False
        for stage in ready:
            done.add((stage, *left[stage].pop(0)))
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
