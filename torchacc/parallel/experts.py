"""Which modules hold experts, and which devices compute which of them where they are spread (expert parallelism).

At rest their parameters are sharded as all others are: by rows, and a row is an expert. Devices that differ along other
axes than that of experts gather their rows together, and compute the experts that these are.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from torchacc.errors import ConfigError
from torchacc.parallel.axes import Role, axis_with
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import chunk

_EP = axis_with(Role.BATCH, Role.SHARD, Role.EXPERT)


@dataclass(frozen=True)
class Experts:
    """A module that holds the experts of a layer, stacked along the first dimension of each of its parameters."""

    module: str
    """Its name."""
    held: tuple[tuple[int, ...], ...]
    """For each index along the axis of experts, which of them its devices gather, in the order of their rows."""

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


def count_experts(module: nn.Module) -> int | None:
    """Return how many experts a module holds, stacked along the first dimension of its parameters; None for others."""
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    if not type(module).__name__.endswith("Experts") or not isinstance(count, int) or not own:
        return None
    if len(own) < len(list(module.parameters())):
        return None
    return count if all(each.dim() > 1 and each.shape[0] == count for each in own) else None


def _held(name: str, count: int, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Return for each index along the axis of experts those that its devices gather, equally many.

    Raises:
        ConfigError: The rows of its devices would not be shards of equally many experts.
    """
    size, shards = mesh.size(Role.EXPERT), mesh.num_shards
    rows: list[list[range]] = [[] for _ in range(size)]
    for device in mesh.groups(Role.SHARD)[0]:
        rows[mesh.index(device, Role.EXPERT)].append(chunk(count, shards, mesh.index(device, Role.SHARD)))
    each, per_group = count // size, shards // size
    expected = [len(chunk(each, per_group, index)) for index in range(per_group)]
    if count % size or any([len(own) for own in held] != expected for held in rows):
        raise ConfigError(
            f"config.dist.{_EP}.size = {size} on a mesh of {mesh.describe()}: the {count} experts of {name!r} are "
            f"sharded over {shards} devices, by whole experts, and would not be equally many for each of {size}: "
            f"choose sizes whose product divides {count}, and config.dist.dp.size for the other devices"
        )
    return tuple(tuple(expert for own in held for expert in own) for held in rows)
