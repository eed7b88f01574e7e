"""Which chip takes which place on a mesh, for TPUs that are not there."""

import random
from itertools import pairwise, product
from math import prod

import pytest

from torchacc.parallel.device_order import order_devices


def slices_of(shape, slices=1):
    """Return the places of the chips of some slices, as XLA numbers them: the first dimension fastest."""
    boxes = [tuple(reversed(at)) for at in product(*(range(size) for size in reversed(shape)))]
    return [(number, *at) for number in range(slices) for at in boxes]


def along(order, sizes, axis):
    """Return the places of each group of devices along an axis."""
    inner, count = prod(sizes[axis + 1 :]), sizes[axis]
    starts = [at for at in range(len(order)) if at // inner % count == 0]
    return [[order[start + step * inner] for step in range(count)] for start in starts]


def ordered(places, sizes):
    order = [places[device] for device in order_devices(places, sizes)]
    assert sorted(order) == sorted(places)
    return order


def distance(one, other):
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def are_neighbours(groups):
    return all(distance(*pair) == 1 for group in groups for pair in pairwise(group))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((2, 4), (1, 8, 1)),
        ((2, 4), (1, 2, 4)),
        ((2, 4), (2, 2, 2)),
        ((4, 4), (1, 4, 4)),
        ((4, 4), (1, 16, 1)),
        ((4, 4), (1, 2, 8)),
        ((2, 2, 1), (1, 4, 1)),
        ((2, 2, 4), (1, 4, 4)),
        ((4, 4, 4), (4, 4, 4)),
        ((4, 4, 4), (1, 64, 1)),
        ((4, 4, 8), (2, 8, 8)),
    ],
)
def test_the_last_axis_that_has_devices_goes_from_neighbour_to_neighbour(shape, sizes):
    order = ordered(slices_of(shape), sizes)
    last = max(axis for axis, size in enumerate(sizes) if size > 1)
    assert are_neighbours(along(order, sizes, last))


def test_whole_dimensions_come_before_parts_and_several_before_one():
    order = ordered(slices_of((4, 4, 4)), (4, 16))
    for group in along(order, (4, 16), 1):
        assert sorted(len(set(dim)) for dim in zip(*group, strict=True)) == [1, 1, 4, 4]  # a plane of the torus
    order = ordered(slices_of((2, 4)), (2, 4))
    assert all(len({place[1] for place in group}) == 1 for group in along(order, (2, 4), 1))  # a row, not a square


def test_a_ring_of_all_chips_closes():
    for shape in ((2, 4), (4, 4), (2, 2, 1), (2, 2, 4)):
        (ring,) = along(ordered(slices_of(shape), (prod(shape),)), (prod(shape),), 0)
        assert distance(ring[0], ring[-1]) == 1 or shape == (4, 4)  # where the torus itself has to close it


def test_slices_go_to_the_first_axes():
    sizes = (2, 4, 2)
    order = ordered(slices_of((2, 4), slices=2), sizes)
    assert all(len({place[0] for place in group}) == 2 for group in along(order, sizes, 0))
    for axis in (1, 2):
        assert all(len({place[0] for place in group}) == 1 for group in along(order, sizes, axis))


def test_an_axis_over_more_than_the_slices_has_parts_of_each_beside_each_other():
    (group,) = along(ordered(slices_of((2, 2), slices=4), (16,)), (16,), 0)
    assert [place[0] for place in group] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    sizes = (4, 4)
    order = ordered(slices_of((2, 4), slices=2), sizes)
    assert all([place[0] for place in group] == [0, 0, 1, 1] for group in along(order, sizes, 0))


def test_numbers_of_devices_mean_nothing():
    places = slices_of((4, 4))
    expected = ordered(places, (2, 8))
    random.Random(0).shuffle(places)
    assert ordered(places, (2, 8)) == expected


def test_cores_of_a_chip_are_neighbours():
    places = [(*place, core) for place in slices_of((2, 2, 1)) for core in range(2)]
    order = ordered(places, (4, 2))
    assert all(one[:-1] == other[:-1] for one, other in along(order, (4, 2), 1))


def test_chips_that_fill_no_box_stay_as_they_are():
    places = [*slices_of((2, 4))[:-2], (0, 5, 5), (0, 6, 6)]
    assert order_devices(places, (2, 4)) == list(range(8))
    assert order_devices([(0, 0, 0)] * 4, (4,)) == list(range(4))
