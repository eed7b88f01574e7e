"""The axes of the mesh and what each is for. All else asks by role; only here does an axis have its name.

docs/design/architecture.md says what else a new axis touches.
"""

from collections.abc import Iterable, Mapping
from enum import Enum


class Role(Enum):
    """What the devices along an axis have in common, and what not."""

    BATCH = "batch"
    """They see different data, and their gradients are averaged."""
    REPLICATE = "replicate"
    """They hold copies of the same shards."""
    SHARD = "shard"
    """Parameters, gradients and optimizer state are sharded over them."""
    TENSOR = "tensor"
    """Each layer's matmuls are split over them."""
    SEQUENCE = "sequence"
    """Each sample is split over them, along its length. (`tp.sequence_parallel` is another thing, along TENSOR.)"""
    EXPERT = "expert"
    """The experts of a layer are spread over them: a token goes to the devices that hold its experts."""
    PIPELINE = "pipeline"
    """Layers are split into stages over them."""


AXES: Mapping[str, frozenset[Role]] = {
    "dp": frozenset({Role.BATCH, Role.REPLICATE}),
    "fsdp": frozenset({Role.BATCH, Role.SHARD}),
    "tp": frozenset({Role.TENSOR}),
    "pp": frozenset({Role.PIPELINE}),
    "sp": frozenset({Role.SEQUENCE, Role.SHARD}),
    "ep": frozenset({Role.BATCH, Role.SHARD, Role.EXPERT}),
}
"""The axes by the names of their sections in `config.dist`; of those with the role BATCH the first is the slowest in
the order of the data. (Devices are numbered in another order: `Axis` in `config/option_types.py`.)"""

MODEL_PARALLEL = (Role.TENSOR, Role.SEQUENCE, Role.PIPELINE, Role.EXPERT)
"""The roles of axes along which devices compute different parts of one step."""

AxisNames = str | tuple[str, ...] | None
"""What one dimension of a tensor is split over: an axis, several of which the first is the slowest, or none."""

ParameterSpec = tuple[AxisNames, ...]
"""For each dimension of a parameter what it is split over; empty where nothing is said of it."""


def axes_with(*roles: Role) -> tuple[str, ...]:
    """Return the names of the axes that have any of these roles, in the order of the table."""
    return tuple(name for name, own in AXES.items() if own.intersection(roles))


def axis_with(*roles: Role) -> str:
    """Return the name of the axis with exactly these roles, of which there is one."""
    (name,) = (name for name, own in AXES.items() if own == frozenset(roles))
    return name


def axes_in(entry: AxisNames) -> tuple[str, ...]:
    """Return the axes in one entry of a spec."""
    return (entry,) if isinstance(entry, str) else entry or ()


def entry_of(names: Iterable[str]) -> AxisNames:
    """Return the entry of a spec for these axes."""
    found = tuple(names)
    return found if len(found) > 1 else found[0] if found else None


def dim_over(spec: ParameterSpec, role: Role) -> int | None:
    """Return the first dimension that a spec splits over an axis with this role; None where there is none."""
    names = set(axes_with(role))
    return next((dim for dim, entry in enumerate(spec) if names.intersection(axes_in(entry))), None)


def restricted_to(spec: ParameterSpec, *roles: Role) -> ParameterSpec:
    """Return what a spec says of the axes that have any of these roles."""
    names = axes_with(*roles)
    return tuple(entry_of(name for name in axes_in(entry) if name in names) for entry in spec)
