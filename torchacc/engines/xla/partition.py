"""How a tensor is split over a mesh, in the terms of XLA's OpSharding. Pure arithmetic.

torch_xla's own translation takes a tensor for fully tiled when all of its dimensions are split, also where a further
mesh axis replicates it; here the axes that a spec leaves out always replicate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from torchacc.parallel.axes import AxisNames, axes_in

Spec = Sequence[AxisNames]
"""For each dimension of a tensor what it is split over."""

# torch_xla.distributed.spmd.ShardingType
REPLICATED, TILED, PARTIAL = 0, 3, 5


@dataclass(frozen=True)
class Partition:
    """The arguments of torch_xla's OpSharding and XlaShardingSpec."""

    tile_assignment: list[Any]
    """Devices by tile; a nested list with one level for each dimension of the tensor."""
    group_assignment: list[Any]
    """Groups of replicas by tile."""
    replication_groups: list[list[int]]
    """The devices of each group."""
    sharding_type: int

    def in_hlo(self) -> str:
        """Return it as XLA writes it into a program's text."""
        if self.sharding_type == REPLICATED:
            return "{replicated}"
        tiles = np.array(self.tile_assignment)
        shape, devices = (",".join(map(str, numbers)) for numbers in (tiles.shape, tiles.ravel()))
        last = " last_tile_dim_replicate" if self.sharding_type == PARTIAL else ""
        return f"{{devices=[{shape}]{devices}{last}}}"


def partition(spec: Spec, axes: Mapping[str, int], order: Sequence[int] | None = None) -> Partition:
    """Translate a spec for a mesh.

    Args:
        spec: How each dimension of the tensor is split.
        axes: Name and size of each mesh axis, the slowest first.
        order: XLA's number of the device at each place on the mesh, row-major; None for 0, 1, 2 …
    """
    by_dim = [axes_in(entry) for entry in spec]
    used = [name for names in by_dim for name in names]
    unused = [name for name in axes if name not in used]
    tiles = [prod(axes[name] for name in names) for names in by_dim]
    if prod(tiles) == 1:
        return Partition([], [], [], REPLICATED)
    names = list(axes)
    numbers = np.arange(prod(axes.values())) if order is None else np.array(order)
    devices = numbers.reshape(tuple(axes.values()))
    ordered = devices.transpose([names.index(name) for name in used + unused]).reshape(*tiles, -1)
    if ordered.shape[-1] == 1:
        return Partition(ordered[..., 0].tolist(), [], [], TILED)
    groups = ordered.reshape(prod(tiles), -1)
    return Partition(ordered.tolist(), np.arange(len(groups)).reshape(tiles).tolist(), groups.tolist(), PARTIAL)
