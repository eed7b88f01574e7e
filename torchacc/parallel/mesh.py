"""Where each device lies on the mesh: axis sizes to coordinates and groups, in plain integers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from torchacc.parallel.axes import Role, axes_with, axis_with

if TYPE_CHECKING:
    from torchacc.config import Config


@dataclass(frozen=True)
class Strategy:
    """What a sharding strategy comes to."""

    shards: bool
    """Whether parameters are sharded; otherwise the devices that would share them hold copies."""
    reshard_after_forward: bool
    """Whether a unit's parameters are freed after its forward, and gathered again for its backward."""


STRATEGIES: Mapping[str, Strategy] = {
    "FULL_SHARD": Strategy(shards=True, reshard_after_forward=True),
    "HYBRID_SHARD": Strategy(shards=True, reshard_after_forward=True),
    "SHARD_GRAD_OP": Strategy(shards=True, reshard_after_forward=False),
    "NO_SHARD": Strategy(shards=False, reshard_after_forward=False),
}


@dataclass(frozen=True)
class Mesh:
    """A mesh of devices, numbered row-major: the last axis varies fastest."""

    sizes: tuple[tuple[str, int], ...]
    """Name and size of each axis, the slowest first."""

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes' names, the slowest first."""
        return tuple(name for name, _ in self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The axes' sizes, the slowest first."""
        return tuple(size for _, size in self.sizes)

    @property
    def num_devices(self) -> int:
        """Devices on the mesh."""
        return prod(self.shape)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which devices see different data, in the order of the data, which is that of `AXES`."""
        return tuple(name for name in axes_with(Role.BATCH) if name in self.axis_names)

    @property
    def data_parallel_size(self) -> int:
        """Parts into which each global batch is split."""
        return self.size(Role.BATCH)

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged over devices, as several see different data."""
        return self.data_parallel_size > 1

    @property
    def num_shards(self) -> int:
        """Parts into which each parameter, or what tensor parallelism leaves of it, is sharded."""
        return self.size(Role.SHARD)

    def axes(self, *roles: Role) -> tuple[str, ...]:
        """Return the names of the axes that have any of these roles, the slowest first."""
        wanted = axes_with(*roles)
        return tuple(name for name in self.axis_names if name in wanted)

    def axis_size(self, axis: str) -> int:
        """Return the number of devices along one axis; 1 for one that the mesh does not have."""
        return dict(self.sizes).get(axis, 1)

    def size(self, *roles: Role) -> int:
        """Return the number of devices along all axes that have any of these roles together."""
        return prod(self.axis_size(axis) for axis in self.axes(*roles))

    def coordinates(self, device: int) -> dict[str, int]:
        """Return a device's position on each axis."""
        if not 0 <= device < self.num_devices:
            raise IndexError(f"device {device} of a mesh of {self.num_devices}")
        positions = {}
        for name, size in reversed(self.sizes):
            device, positions[name] = divmod(device, size)
        return {name: positions[name] for name in self.axis_names}

    def device(self, **coords: int) -> int:
        """Return the device at a position; an axis that is not named is at 0."""
        device = 0
        for name, size in self.sizes:
            device = device * size + coords.get(name, 0)
        return device

    def index(self, device: int, *roles: Role) -> int:
        """Return a device's number among the `size(*roles)` that differ from it only along axes with these roles.

        Args:
            device: The device.
            roles: The slowest first; within a role the axes are in the order of the mesh.
        """
        return self.index_along(device, dict.fromkeys(axis for role in roles for axis in self.axes(role)))

    def rank_in_group(self, device: int, *roles: Role) -> int:
        """Return a device's rank in its group of `groups(*roles)`."""
        return self.index_along(device, self.axes(*roles))

    def data_parallel_rank(self, device: int) -> int:
        """Return which part of the global batch a device sees."""
        return self.index_along(device, self.data_axes)

    def groups(self, *roles: Role) -> list[list[int]]:
        """Return the groups of devices that differ only along axes with these roles, each in the order of the mesh."""
        return self.groups_along(self.axes(*roles))

    def groups_along(self, along: Sequence[str]) -> list[list[int]]:
        """Return the groups of devices that differ only along these axes, each in the order of the mesh."""
        across = [name for name in self.axis_names if name not in along]
        return [
            [self.device(**fixed, **moving) for moving in self._positions(along)] for fixed in self._positions(across)
        ]

    def describe(self) -> str:
        """Return the mesh in words: replicas and shards, and what else is larger than one, such as `dp 1 x fsdp 4`."""
        always = (axis_with(Role.BATCH, Role.REPLICATE), axis_with(Role.BATCH, Role.SHARD))
        return " x ".join(f"{name} {size}" for name, size in self.sizes if size > 1 or name in always)

    def index_along(self, device: int, axes: Iterable[str]) -> int:
        """Return a device's number among those that differ from it only along these axes, the slowest first."""
        coordinates, number = self.coordinates(device), 0
        for axis in axes:
            number = number * self.axis_size(axis) + coordinates[axis]
        return number

    def _positions(self, axes: Sequence[str]) -> list[dict[str, int]]:
        return [dict(zip(axes, at, strict=True)) for at in product(*(range(self.axis_size(axis)) for axis in axes))]


def from_config(config: "Config") -> Mesh:
    """Return the mesh that a resolved config asks for; with NO_SHARD the axis of shards becomes one of replicas.

    Args:
        config: A config that `resolve()` returned.
    """
    dist = config.dist
    assert dist.dp.size is not None, "resolve() sizes every axis"
    sizes: dict[str, int] = {axis: getattr(dist, axis).size for axis in dist.topology}
    if not STRATEGIES[dist.fsdp.sharding_strategy].shards:
        replicates, shards = axis_with(Role.BATCH, Role.REPLICATE), axis_with(Role.BATCH, Role.SHARD)
        sizes |= {replicates: sizes[replicates] * sizes[shards], shards: 1}
    return Mesh(tuple(sizes.items()))
