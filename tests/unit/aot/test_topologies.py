"""Names of TPUs."""

import pytest

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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v9:2x2", "no such chip"),
        ("V5E:2x4", "did you mean v5e:2x4"),
        ("v5litepod-8", "no such chip"),
        ("h100x8", "no such chip"),
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
    assert "v5e:2x4" in str(error.value) or "v5p:4x4x4" in str(error.value)
