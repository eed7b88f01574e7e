"""Which modules hold experts, and which devices compute which of them where they are spread (expert parallelism).

At rest their parameters are sharded as all others are: by rows, and a row is an expert. Where layers are split, devices
that share a layer have different experts, too (`split_specs()`). Devices that differ along other axes than these two
gather their rows together, and compute the experts that these are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from torch import nn

from torchacc.errors import ConfigError
from torchacc.parallel.axes import ParameterSpec, Role, axis_with, entry_of
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import chunk

_EP = axis_with(Role.BATCH, Role.SHARD, Role.EXPERT)
_TP = axis_with(Role.TENSOR)
EXPERT_SHARDING_ROLES = (Role.EXPERT, Role.TENSOR)
"""The roles of the axes along which devices hold different experts."""


@dataclass(frozen=True)
class Experts:
    """A module that holds the experts of a layer, stacked along the first dimension of each of its parameters."""

    module: str
    """Its name."""
    held: tuple[tuple[int, ...], ...]
    """For each place among the devices that hold different experts, in the order of the mesh, which of them the devices
    there gather, in the order of their rows."""

    @property
    def num_experts(self) -> int:
        """Number of experts of the layer."""
        return sum(map(len, self.held))

    @property
    def num_held(self) -> int:
        """Number of experts that a device computes."""
        return len(self.held[0])

    @property
    def positions(self) -> list[int]:
        """For each expert its position where the held ones of all indices lie one after another."""
        order = [expert for held in self.held for expert in held]
        return sorted(range(len(order)), key=order.__getitem__)

    def __str__(self) -> str:
        return f"  experts: {self.num_held} of the {self.num_experts} of {self.module or '(model)'} on each device"


def select_experts(model: nn.Module, mesh: Mesh) -> tuple[Experts, ...]:
    """Return the modules whose experts are spread over a mesh; none where it has no axis for them.

    Raises:
        ConfigError: There is no such module, or its experts cannot be divided.
    """
    size = mesh.size(Role.EXPERT)
    if size == 1:
        return ()
    counts = {name: count for name, module in model.named_modules() if (count := count_experts(module)) is not None}
    if not counts:
        raise ConfigError(
            f"config.dist.{_EP}.size = {size} spreads experts over devices, and {type(model).__name__} has no module "
            "of experts, whose parameters are stacked along their first dimension as in transformers 5: leave "
            f"config.dist.{_EP}.size at 1, and use config.dist.fsdp.size"
        )
    return tuple(Experts(name, _held(name, count, mesh)) for name, count in counts.items())


def on_mesh(experts: Iterable[Experts], mesh: Mesh) -> tuple[Experts, ...]:
    """Return where the experts of the same modules lie on another mesh with such an axis.

    Raises:
        ConfigError: They cannot be divided there.
    """
    return tuple(Experts(each.module, _held(each.module, each.num_experts, mesh)) for each in experts)


def split_specs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ParameterSpec]:
    """Return how parameters of experts are split where layers are: each device has some of the experts, whole.

    Args:
        shapes: The parameters of experts, by name.
    """
    return {name: (_TP, *[None] * (len(shape) - 1)) for name, shape in shapes.items()}


def spread_spec(shape: Sequence[int], mesh: Mesh) -> ParameterSpec:
    """Return how a parameter of spread experts is split where one program drives all devices.

    By experts over the devices that compute different ones. Those that compute the same ones share their rows, where
    there are as many: what a device gathers then lies side by side.

    Args:
        shape: Its full shape.
        mesh: The mesh.
    """
    held = mesh.axes(*EXPERT_SHARDING_ROLES)
    every = (*held, *(axis for axis in mesh.axes(Role.SHARD) if axis not in held))
    divides = shape[0] % prod(map(mesh.axis_size, every)) == 0
    return (entry_of(every if divides else held), *[None] * (len(shape) - 1))


def count_experts(module: nn.Module) -> int | None:
    """Return how many experts a module holds, stacked along the first dimension of its parameters; None for others."""
    count, own = count_routed(module), list(module.parameters(recurse=False))
    if count is None or not own:
        return None
    if len(own) < len(list(module.parameters())):
        return None
    return count if all(each.dim() > 1 and each.shape[0] == count for each in own) else None


def count_routed(module: nn.Module) -> int | None:
    """Return among how many experts a module's tokens are spread, also where it has no parameters; None for others."""
    count = getattr(module, "num_experts", None)
    return count if type(module).__name__.endswith("Experts") and isinstance(count, int) else None


def _held(name: str, count: int, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return for each place among devices with different experts those that its devices gather, equally many.

    Raises:
        ConfigError: The rows of its devices would not be shards of equally many experts.
    """
    parts, size, shards = mesh.size(Role.TENSOR), mesh.size(Role.EXPERT), mesh.num_shards
    part = -(-count // parts)
    rows: list[list[range]] = [[] for _ in range(size * parts)]
    for device in mesh.groups(Role.SHARD, Role.TENSOR)[0]:
        own, first = chunk(part, shards, mesh.index(device, Role.SHARD)), part * mesh.index(device, Role.TENSOR)
        rows[mesh.rank_in_group(device, *EXPERT_SHARDING_ROLES)].append(range(first + own.start, first + own.stop))
    each, per_group = count // (size * parts), shards // size
    expected = [len(chunk(each, per_group, index)) for index in range(per_group)]
    if count % (size * parts) or any([len(own) for own in held] != expected for held in rows):
        split = f", split over {_TP} {parts}," if parts > 1 else ""
        raise ConfigError(
            f"config.dist.{_EP}.size = {size} on a mesh of {mesh.describe()}: the {count} experts of {name!r}{split} "
            f"are sharded over {shards} devices, by whole experts, and would not be equally many for each of {size}: "
            f"choose sizes whose product divides {count}, and config.dist.dp.size for the other devices"
        )
    return tuple(tuple(expert for own in held for expert in own) for held in rows)
