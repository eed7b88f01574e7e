"""Where each device lies on the mesh: axis sizes to coordinates and groups, in plain integers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from torchacc.config import Config

DATA_AXES = ("dp", "fsdp")
"""The axes along which devices see different data, the slower first."""


def _replicate_and_shard(dp: int, fsdp: int) -> tuple[int, int]:
    return dp, fsdp


def _replicate_only(dp: int, fsdp: int) -> tuple[int, int]:
    return dp * fsdp, 1


@dataclass(frozen=True)
class Strategy:
    """What a sharding strategy comes to."""

    sizes: Callable[[int, int], tuple[int, int]]
    """Turns the sizes of `dp` and `fsdp` that a config asks for into those of the mesh."""
    reshard_after_forward: bool
    """Whether a unit's weights are freed after its forward, and gathered again for its backward."""


STRATEGIES: Mapping[str, Strategy] = {
    "FULL_SHARD": Strategy(_replicate_and_shard, reshard_after_forward=True),
    "HYBRID_SHARD": Strategy(_replicate_and_shard, reshard_after_forward=True),
    "SHARD_GRAD_OP": Strategy(_replicate_and_shard, reshard_after_forward=False),
    "NO_SHARD": Strategy(_replicate_only, reshard_after_forward=False),
}


@dataclass(frozen=True)
class Mesh:
    """A mesh of devices, numbered row-major: the last axis varies fastest."""

    axes: tuple[tuple[str, int], ...]
    """Name and size of each axis, the slowest first."""

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes' names, the slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' sizes, the slowest first."""
        return tuple(size for _, size in self.axes)

    @property
    def num_devices(self) -> int:
        """Devices on the mesh."""
        return prod(self.shape)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which devices see different data, `dp` first."""
        return tuple(name for name in DATA_AXES if name in self.axis_names)

    @property
    def num_data_shards(self) -> int:
        """Parts into which each global batch is split."""
        return prod(self.size(axis) for axis in self.data_axes)

    def size(self, axis: str) -> int:
        """Return the number of devices along an axis; 1 for one that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def coordinates(self, device: int) -> dict[str, int]:
        """Return a device's position on each axis."""
        if not 0 <= device < self.num_devices:
            raise IndexError(f"device {device} of a mesh of {self.num_devices}")
        positions = {}
        for name, size in reversed(self.axes):
            device, positions[name] = divmod(device, size)
        return {name: positions[name] for name in self.axis_names}

    def device(self, **coords: int) -> int:
        """Return the device at a position; an axis that is not named is at 0."""
        device = 0
        for name, size in self.axes:
            device = device * size + coords.get(name, 0)
        return device

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of devices that differ only along these axes, each in the order of the mesh."""
        along = [name for name in self.axis_names if name in axes]
        across = [name for name in self.axis_names if name not in axes]
        return [
            [self.device(**fixed, **moving) for moving in self._positions(along)] for fixed in self._positions(across)
        ]

    def data_shard(self, device: int) -> int:
        """Return which part of the global batch a device sees: its number along `dp`, then `fsdp`."""
        coords = self.coordinates(device)
        shard = 0
        for axis in self.data_axes:
            shard = shard * self.size(axis) + coords[axis]
        return shard

    def describe(self) -> str:
        """Return the mesh in words: its data axes, and what else is larger than one, such as `dp 1 x fsdp 4`."""
        return " x ".join(f"{name} {size}" for name, size in self.axes if size > 1 or name in DATA_AXES)

    def _positions(self, axes: list[str]) -> list[dict[str, int]]:
        return [dict(zip(axes, at, strict=True)) for at in product(*(range(self.size(axis)) for axis in axes))]


def from_config(config: Config) -> Mesh:
    """Return the mesh that a resolved config asks for, after its sharding strategy has had its say.

    Args:
        config: A config that `resolve()` returned.
    """
    dist = config.dist
    assert dist.dp.size is not None, "resolve() sizes every axis"
    dp, fsdp = STRATEGIES[dist.fsdp.sharding_strategy].sizes(dist.dp.size, dist.fsdp.size)
    sizes = {"dp": dp, "fsdp": fsdp, "pp": dist.pp.size, "sp": dist.sp.size, "tp": dist.tp.size}
    return Mesh(tuple((axis, sizes[axis]) for axis in dist.topology))
