"""Names of TPUs and GPUs."""

from types import SimpleNamespace

import pytest

from torchacc.aot.compile_deviceless import _ordered
from torchacc.aot.topologies import CHIPS, find_topology
from torchacc.errors import ConfigError


@pytest.mark.parametrize("name", [name for chip in CHIPS.values() for name in chip.examples])
def test_each_example_is_a_topology(name):
    topology = find_topology(name)
    assert topology.name == name
    assert len(topology.shape) == topology.chip.num_dims


def test_a_single_chip_is_no_whole_machine():
    assert find_topology("v5e:1x1").options == {"chips_per_host_bounds": [1, 1, 1]}
    assert find_topology("v5e:2x4").num_devices == 8


@pytest.mark.parametrize(("name", "machines"), [("h100x4", "1x1x4"), ("h100x8", "1x1x8"), ("h100x24", "1x3x8")])
def test_gpus_are_those_of_machines_as_xla_describes_them(name, machines):
    options = find_topology(name).options
    assert options["topology"] == machines
    assert "major: 9" in options["target_config"]


@pytest.mark.parametrize(
    ("name", "groups", "speed"),
    [
        ("h100x8", [], 450e9),
        ("h100x4", [[0, 1], [2, 3]], 450e9),
        ("h100x64", [[0, 1, 2, 3], [4, 5, 6, 7]], 450e9),
        ("h100x64", [], 400e9),
        ("h100x64", [[0, 8, 16]], 50e9),
        ("h100x64", [[0, 1, 8, 9], [2, 3, 10, 11]], 100e9),
        ("v5p:4x4x4", [], 600e9),
    ],
)
def test_between_machines_a_ring_has_the_ways_of_all_its_gpus_of_one(name, groups, speed):
    assert find_topology(name).wire_bytes_per_second(groups) == speed


def test_a_program_has_what_xla_takes_of_a_gpu():
    topology = find_topology("h100x8")
    assert topology.device_bytes(None) == 60 * 10**9
    assert topology.device_bytes(0.9) == 72 * 10**9
    assert find_topology("v5e:2x4").device_bytes(None) == 16 * 2**30


def test_devices_of_tpus_lie_as_the_engine_puts_them():
    places = find_topology("v5e:2x4").places_on((1, 2, 4))
    assert [place[1:3] for place in places] == [(x, y) for x in range(2) for y in range(4)]
    assert {len(place) for place in find_topology("v5p:2x2x1").places_on((4,))} == {5}  # slice, three dimensions, core
    assert find_topology("h100x8").places_on((8,)) == []
    assert find_topology("v5e:2x4").places_on(()) == []


def test_the_compiler_finds_devices_by_their_places():
    devices = [
        SimpleNamespace(id=100 * number + x, slice_index=number, coords=[x, 0, 0], core_on_chip=0)
        for number in range(2)
        for x in range(2)
    ]
    assert _ordered(devices, [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]) == [101, 0]
    assert _ordered(devices, []) == [0, 1, 100, 101]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v9:2x2", "no such chip"),
        ("V5E:2x4", "did you mean v5e:2x4"),
        ("v5litepod-8", "no such chip"),
        ("h200x8", "did you mean h100x8"),
        ("H100x8", "did you mean h100x8"),
        ("h100", "h100x1, h100x2, h100x4, h100x8"),
        ("h100:8", "a machine has 8 x NVIDIA H100 SXM"),
        ("h100x3", "a multiple of 8 for several, such as h100x1"),
        ("h100x12", "a multiple of 8"),
        ("h100x0", "a multiple of 8"),
        ("v5ex4", "2 dimensions"),
        ("v5e", "2 dimensions"),
        ("v5e:2x2x2", "2 dimensions"),
        ("v5p:2x2", "3 dimensions"),
        ("v5e:0x2", "2 dimensions"),
        ("v5e:-2x2", "2 dimensions"),
        ("v5e:2x", "2 dimensions"),
        ("v5e:3x5", "a machine has 2x2"),
        ("v5e:99999x2", "2 dimensions"),
    ],
)
def test_others_are_refused_with_examples(name, says):
    with pytest.raises(ConfigError, match=says) as error:
        find_topology(name)
    assert any(each in str(error.value) for each in ("v5e:2x4", "v5p:4x4x4", "h100x8"))
