from typing import get_args

import pytest

from torchacc.config import Config, resolve
from torchacc.config.sections import ShardingStrategy
from torchacc.env import Job
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
    assert FSDP_OUTSIDE.size("tp") == 2


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
    assert DP2_FSDP3.groups("fsdp") == [[0, 1, 2], [3, 4, 5]]
    assert DP2_FSDP3.groups("dp") == [[0, 3], [1, 4], [2, 5]]


def test_groups_along_several_axes_and_none():
    assert DP2_FSDP3.groups("fsdp", "dp") == [[0, 1, 2, 3, 4, 5]]
    assert DP2_FSDP3.groups() == [[0], [1], [2], [3], [4], [5]]
    assert FSDP_OUTSIDE.groups("fsdp", "dp") == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@pytest.mark.parametrize("axes", [("dp",), ("fsdp",), ("tp", "dp"), ("fsdp", "tp", "dp")])
def test_groups_part_the_devices(axes):
    groups = FSDP_OUTSIDE.groups(*axes)
    assert sorted(device for group in groups for device in group) == list(range(12))


def test_data_shards_are_numbered_dp_first_whatever_the_order_of_axes():
    assert [DP2_FSDP3.data_shard(device) for device in range(6)] == [0, 1, 2, 3, 4, 5]
    # fsdp 0: tp 0 (dp 0, dp 1), tp 1 (dp 0, dp 1); then fsdp 1 ...
    assert [FSDP_OUTSIDE.data_shard(device) for device in range(12)] == [0, 3, 0, 3, 1, 4, 1, 4, 2, 5, 2, 5]
    assert FSDP_OUTSIDE.num_data_shards == 6
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


def test_no_strategy_changes_the_number_of_devices():
    for strategy in STRATEGIES.values():
        replicate, shard = strategy.sizes(2, 3)
        assert replicate * shard == 6


def test_the_configs_order_of_axes_is_the_meshs():
    mesh = mesh_of(4, fsdp={"size": 2}, topology=["fsdp", "dp", "tp", "sp", "pp"])
    assert mesh.axes == (("fsdp", 2), ("dp", 2), ("tp", 1), ("sp", 1), ("pp", 1))
