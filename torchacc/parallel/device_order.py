"""Which device takes which place on a mesh, so that axes whose devices talk most lie on neighbours. Plain integers.

The last axes of a mesh, `tp` first, exchange something in each layer, and the first ones, `dp`, once in a step. So
slices, which a slower network connects, go to the first axes; in a slice the last axis chooses first among the
dimensions of its torus, as in JAX's `mesh_utils.create_device_mesh()`: whole dimensions before parts of one, several
before one, as each has links of its own. Along an axis each device is a neighbour of the one before.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import gcd, prod

Place = tuple[int, ...]
"""Where a device is: the number of its slice, then its position in each dimension of the slice."""


def order_devices(places: Sequence[Place], sizes: Sequence[int]) -> list[int]:
    """Return which device takes each place on a mesh, row-major.

    Args:
        places: Of each device, all with as many dimensions.
        sizes: Of the mesh's axes, the slowest first; together as many as there are devices.

    Returns:
        Indices of `places`; as they are where slices and dimensions are not filled, so that there is no such order.
    """
    number = {place: device for device, place in enumerate(places)}
    extents = [sorted(set(along)) for along in zip(*places, strict=True)]
    if len(number) != len(places) or prod(map(len, extents)) != len(places):
        return list(range(len(places)))
    left = [len(extent) for extent in extents]
    factors = _shares_of_slices(left, sizes)
    for axis in reversed(range(len(sizes))):
        own = _choose(left[1:], sizes[axis] // factors[axis][0])
        factors[axis][1:] = own
        left[1:] = [size // factor for size, factor in zip(left[1:], own, strict=True)]
    return [number[tuple(extent[at] for extent, at in zip(extents, place, strict=True))] for place in _places(factors)]


def _shares_of_slices(left: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return for each axis over how many slices it goes, and room for its factors of the other dimensions."""
    slices, shares = left[0], []
    for size in sizes:
        own = gcd(slices, size)
        shares.append([own] + [1] * (len(left) - 1))
        slices //= own
    return shares


def _choose(left: Sequence[int], size: int) -> tuple[int, ...]:
    """Return how much of each dimension an axis takes of what is left of them."""

    def cost(factors: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        used = [(factor, room) for factor, room in zip(factors, left, strict=True) if factor > 1]
        return sum(factor < room for factor, room in used), -len(used), factors

    divisors = [[factor for factor in range(1, room + 1) if room % factor == 0] for room in left]
    return min((each for each in product(*divisors) if prod(each) == size), key=cost)


def _places(factors: Sequence[Sequence[int]]) -> Iterator[Place]:
    """Yield the position in each dimension of each place on the mesh, row-major."""
    num_dims = len(factors[0])
    inner = [factors[axis + 1 :] for axis in range(len(factors))]
    strides = [[prod(each[dim] for each in axes) for dim in range(num_dims)] for axes in inner]
    for steps in product(*map(_walk, factors)):
        yield tuple(
            sum(step[dim] * stride[dim] for step, stride in zip(steps, strides, strict=True)) for dim in range(num_dims)
        )


def _walk(factors: Sequence[int]) -> list[Place]:
    """Return the positions in a box, each a neighbour of the one before."""
    walked: list[Place] = [()]
    for size in reversed(factors):
        walked = [(at, *rest) for at in range(size) for rest in (walked if at % 2 == 0 else walked[::-1])]
    return walked
