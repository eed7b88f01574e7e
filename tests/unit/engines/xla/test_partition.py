import numpy as np
import pytest

from torchacc.engines.xla.partition import PARTIAL, REPLICATED, TILED, partition

AXES = {"dp": 2, "fsdp": 3}
BATCH = ("dp", "fsdp")


def devices_by_slice(spec, axes, shape):
    """Compute, element by element, which devices hold it: the definition that a partition must agree with."""
    sizes = list(axes.values())
    holders = {}
    for device in range(int(np.prod(sizes))):
        coords = dict(zip(axes, np.unravel_index(device, sizes), strict=True))
        slices = []
        for names, length in zip(spec, shape, strict=True):
            names = (names,) if isinstance(names, str) else names or ()
            tile, tiles = 0, 1
            for name in names:
                tile, tiles = tile * axes[name] + int(coords[name]), tiles * axes[name]
            slices.append((tile * length // tiles, (tile + 1) * length // tiles))
        holders.setdefault(tuple(slices), set()).add(device)
    return holders


def devices_of(found, shape):
    """Read the same from a partition."""
    assignment = np.array(found.tile_assignment)
    tiles = assignment.shape[: len(shape)]
    assignment = assignment.reshape(*tiles, -1)
    holders = {}
    for tile in np.ndindex(*tiles):
        bounds = [(at * n // count, (at + 1) * n // count) for at, n, count in zip(tile, shape, tiles, strict=True)]
        holders[tuple(bounds)] = set(assignment[tile].tolist())
    return holders


@pytest.mark.parametrize("spec", [(), (None,), (None, None), ((), None)])
def test_what_is_not_split_is_replicated(spec):
    found = partition(spec, AXES)
    assert found.sharding_type == REPLICATED
    assert (found.tile_assignment, found.group_assignment, found.replication_groups) == ([], [], [])


def test_axes_of_one_device_split_nothing():
    assert partition(("dp", "fsdp"), {"dp": 1, "fsdp": 1}).sharding_type == REPLICATED
    assert partition(("dp", None), {"dp": 1, "fsdp": 4}).sharding_type == REPLICATED


def test_split_over_all_axes_is_tiled():
    found = partition((BATCH, None), AXES)
    assert found.sharding_type == TILED
    assert found.tile_assignment == [[0], [1], [2], [3], [4], [5]]
    assert found.group_assignment == []
    assert found.replication_groups == []


def test_the_slower_axis_of_a_pair_comes_first():
    assert partition((("fsdp", "dp"),), AXES).tile_assignment == [0, 3, 1, 4, 2, 5]


def test_an_axis_that_is_left_out_replicates():
    found = partition((None, "fsdp"), AXES)
    assert found.sharding_type == PARTIAL
    assert found.replication_groups == [[0, 3], [1, 4], [2, 5]]
    assert found.group_assignment == [[0, 1, 2]]
    assert found.tile_assignment == [[[0, 3], [1, 4], [2, 5]]]


def test_all_dimensions_split_and_still_replicated():
    """Where torch_xla's own translation forgets the replicas."""
    found = partition(("fsdp", "tp"), {"dp": 2, "fsdp": 2, "tp": 2})
    assert found.sharding_type == PARTIAL
    assert found.replication_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert found.group_assignment == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("spec", "axes", "shape"),
    [
        (("fsdp", None), AXES, (6, 2)),
        ((None, "dp"), AXES, (6, 2)),
        (("dp", "fsdp"), AXES, (2, 3)),
        (("fsdp", "dp"), AXES, (3, 4)),
        ((BATCH, None, None), AXES, (12, 2, 2)),
        ((None, ("fsdp", "tp"), "dp"), {"fsdp": 2, "tp": 3, "dp": 2}, (2, 6, 2)),
        (("tp", None), {"dp": 2, "fsdp": 2, "tp": 2}, (4, 4)),
        (("tp", "dp"), {"dp": 2, "fsdp": 2, "tp": 2}, (4, 4)),
    ],
)
def test_each_slice_lies_where_the_mesh_says(spec, axes, shape):
    found = partition(spec, axes)
    assert devices_of(found, shape) == devices_by_slice(spec, axes, shape)
    if found.sharding_type == PARTIAL:
        groups = np.array(found.replication_groups)
        tiles = np.array(found.tile_assignment)
        assert np.array_equal(groups[np.array(found.group_assignment)], tiles)
        assert sorted(groups.reshape(-1).tolist()) == list(range(groups.size))
