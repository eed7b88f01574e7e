"""PJRT's collectives between processes: what one device computes, and the program that four would run.

No machine with several PJRT processes is at hand; XLA's CPU client has one. So the program is read, not run.
"""

import json
from pathlib import Path

import pytest

from tests import forkrun
from torchacc.engines.xla.device_collectives import DeviceCollectives
from torchacc.parallel.mesh import Mesh

pytestmark = pytest.mark.xla


@pytest.fixture(scope="module")
def result():
    program = Path(__file__).with_name("device_collectives_program.py")
    done = forkrun.run(program, imports=["torch_xla"], timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_one_device_computes_what_plain_torch_does(result):
    assert result["gradient_error"] < 1e-5
    assert result["average"] == [1, 1, 1, 1]
    assert result["norm"] == pytest.approx(2)
    assert result["largest"] == 2


def test_weights_are_gathered_inside_of_a_replica_and_with_their_padding(result):
    assert ["f32[4,6]", "all-gather", "{{0,1},{2,3}}"] in result["calls"]


def test_gradients_are_reduced_inside_of_a_replica_then_across(result):
    assert ["f32[2,6]", "reduce-scatter", "{{0,1},{2,3}}"] in result["calls"]
    assert ["f32[2,6]", "all-reduce", "{{0,2},{1,3}}"] in result["calls"]


@pytest.mark.parametrize("ordinals", [[0, 1, 2, 3], [1, 0, 3, 2], [2, 0, 3, 1], [3, 1, 0, 2]])
def test_shards_lie_by_rank_whatever_the_devices_numbers(ordinals):
    mesh = Mesh((("dp", 2), ("fsdp", 2)))
    for rank, ordinal in enumerate(ordinals):
        collectives = DeviceCollectives(mesh, rank, ordinals)
        own = next(group for group in collectives._shards if ordinal in group)
        assert [ordinals.index(other) for other in own] == [rank - rank % 2, rank - rank % 2 + 1]
        assert own.index(ordinal) == collectives.shard_index == rank % 2
        assert [ordinals.index(o) for o in next(g for g in collectives._replicas if ordinal in g)] == [
            rank % 2,
            rank % 2 + 2,
        ]
