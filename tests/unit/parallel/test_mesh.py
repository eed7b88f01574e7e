from typing import get_args

import pytest

from torchacc.config import Config, resolve
from torchacc.config.option_types import ShardingStrategy
from torchacc.env import Job
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import STRATEGIES, Mesh, from_config

DP2_FSDP3 = Mesh((("dp", 2), ("fsdp", 3)))
FSDP_OUTSIDE = Mesh((("fsdp", 3), ("tp", 2), ("dp", 2)))


def mesh_of(num_devices, **dist):
    config = resolve(Config(dist=dist), Job(), num_devices=num_devices)
    return from_config(config)


def test_the_config_takes_the_strategies_that_there_are():
    assert set(get_args(ShardingStrategy)) == set(STRATEGIES)


def test_sizes_and_names():
    assert FSDP_OUTSIDE.num_devices == 12
    assert FSDP_OUTSIDE.axis_names == ("fsdp", "tp", "dp")
    assert FSDP_OUTSIDE.shape == (3, 2, 2)
    assert [FSDP_OUTSIDE.axis_size(axis) for axis in ("fsdp", "tp", "dp", "pp")] == [3, 2, 2, 1]


def test_sizes_and_axes_by_role():
    assert FSDP_OUTSIDE.axes(Role.BATCH) == ("fsdp", "dp")
    assert FSDP_OUTSIDE.axes(Role.SEQUENCE) == ()
    sizes = [FSDP_OUTSIDE.size(role) for role in (Role.SHARD, Role.TENSOR, Role.REPLICATE, Role.PIPELINE)]
    assert sizes == [3, 2, 2, 1]
    assert FSDP_OUTSIDE.size(Role.SHARD, Role.TENSOR) == 6
    assert FSDP_OUTSIDE.size() == 1


def test_an_index_is_a_place_in_a_group():
    for role in Role:
        groups = FSDP_OUTSIDE.groups(role)
        assert all([FSDP_OUTSIDE.index(device, role) for device in group] == [*range(len(group))] for group in groups)
    # dp is the slower of the two, in whichever order the mesh has them
    assert [FSDP_OUTSIDE.index(device, Role.REPLICATE, Role.TENSOR) for device in range(4)] == [0, 2, 1, 3]
    assert FSDP_OUTSIDE.index(5) == 0
    assert [DP2_FSDP3.index(device, Role.REPLICATE, Role.BATCH) for device in range(6)] == [0, 1, 2, 3, 4, 5]


def test_the_last_axis_varies_fastest():
    assert [DP2_FSDP3.coordinates(device) for device in (0, 1, 3)] == [
        {"dp": 0, "fsdp": 0},
        {"dp": 0, "fsdp": 1},
        {"dp": 1, "fsdp": 0},
    ]


@pytest.mark.parametrize("mesh", [DP2_FSDP3, FSDP_OUTSIDE])
def test_coordinates_and_device_are_inverse(mesh):
    devices = range(mesh.num_devices)
    assert [mesh.device(**mesh.coordinates(device)) for device in devices] == list(devices)


@pytest.mark.parametrize("device", [-1, 6])
def test_a_device_outside_of_the_mesh_is_refused(device):
    with pytest.raises(IndexError, match=rf"device {device} of a mesh of 6"):
        DP2_FSDP3.coordinates(device)


def test_groups_along_one_axis():
    assert DP2_FSDP3.groups(Role.SHARD) == [[0, 1, 2], [3, 4, 5]]
    assert DP2_FSDP3.groups(Role.REPLICATE) == [[0, 3], [1, 4], [2, 5]]


def test_groups_along_several_axes_and_none():
    assert DP2_FSDP3.groups(Role.BATCH) == [[0, 1, 2, 3, 4, 5]]
    assert DP2_FSDP3.groups() == [[0], [1], [2], [3], [4], [5]]
    assert FSDP_OUTSIDE.groups(Role.BATCH) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@pytest.mark.parametrize("roles", [(Role.SHARD,), (Role.TENSOR, Role.REPLICATE), (Role.TENSOR, Role.BATCH), ()])
def test_groups_part_the_devices(roles):
    groups = FSDP_OUTSIDE.groups(*roles)
    assert sorted(device for group in groups for device in group) == list(range(12))


def test_data_parallel_ranks_are_numbered_dp_first_whatever_the_order_of_axes():
    assert [DP2_FSDP3.data_parallel_rank(device) for device in range(6)] == [0, 1, 2, 3, 4, 5]
    # fsdp 0: tp 0 (dp 0, dp 1), tp 1 (dp 0, dp 1); then fsdp 1 ...
    assert [FSDP_OUTSIDE.data_parallel_rank(device) for device in range(12)] == [0, 3, 0, 3, 1, 4, 1, 4, 2, 5, 2, 5]
    assert FSDP_OUTSIDE.data_parallel_size == 6
    assert FSDP_OUTSIDE.data_axes == ("dp", "fsdp")


def test_a_mesh_is_described_by_what_is_larger_than_one_and_its_data_axes():
    assert mesh_of(4, fsdp={"size": 4}).describe() == "dp 1 x fsdp 4"
    assert FSDP_OUTSIDE.describe() == "fsdp 3 x tp 2 x dp 2"


@pytest.mark.parametrize(
    ("strategy", "dp", "fsdp", "expected"),
    [
        ("FULL_SHARD", 1, 4, "dp 1 x fsdp 4"),
        ("FULL_SHARD", 2, 2, "dp 2 x fsdp 2"),
        ("HYBRID_SHARD", 2, 2, "dp 2 x fsdp 2"),
        ("NO_SHARD", 1, 4, "dp 4 x fsdp 1"),
        ("NO_SHARD", 2, 2, "dp 4 x fsdp 1"),
    ],
)
def test_a_strategy_is_a_mesh_shape(strategy, dp, fsdp, expected):
    mesh = mesh_of(4, dp={"size": dp}, fsdp={"size": fsdp, "sharding_strategy": strategy})
    assert mesh.describe() == expected
    assert mesh.num_devices == 4


def test_the_configs_order_of_axes_is_the_meshs():
    mesh = mesh_of(4, fsdp={"size": 2}, topology=["fsdp", "dp", "tp", "sp", "pp"])
    assert mesh.sizes == (("fsdp", 2), ("dp", 2), ("tp", 1), ("sp", 1), ("pp", 1), ("ep", 1))  # none was named
