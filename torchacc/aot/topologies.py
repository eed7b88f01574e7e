"""The TPUs that a program can be compiled for: names such as `v5e:2x4`, and what their chips are."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Any

from torchacc.errors import ConfigError, shown


@dataclass(frozen=True)
class Chip:
    """What a vendor says of one chip, which is one device of XLA's."""

    name: str
    """The vendor's."""
    num_dims: int
    """Of the torus, or mesh, in which the chips are connected."""
    flops_per_second: float
    """Of products in bfloat16."""
    memory_bytes: int
    memory_bytes_per_second: float
    wire_bytes_per_second: float
    """Of all links to other chips together, in one direction."""
    clock_hz: float
    """Of the core, by which the compiler's cycles become seconds."""
    examples: tuple[str, ...]
    host: tuple[int, ...]
    """The chips of one machine, along each dimension."""


CHIPS: Mapping[str, Chip] = {
    "v4": Chip("TPU v4", 3, 275e12, 32 * 2**30, 1228e9, 300e9, 1.05e9, ("v4:2x2x1", "v4:4x4x4"), (2, 2, 1)),
    "v5e": Chip("TPU v5e", 2, 197e12, 16 * 2**30, 819e9, 200e9, 1.5e9, ("v5e:2x2", "v5e:2x4", "v5e:16x16"), (2, 2)),
    "v5p": Chip(
        "TPU v5p", 3, 459e12, 95 * 2**30, 2765e9, 600e9, 1.75e9, ("v5p:2x2x1", "v5p:4x4x4", "v5p:8x8x8"), (2, 2, 1)
    ),
    "v6e": Chip("TPU v6e", 2, 918e12, 32 * 2**30, 1640e9, 448e9, 1.75e9, ("v6e:2x4", "v6e:4x4", "v6e:16x16"), (2, 2)),
}
"""By the first part of a topology's name. The numbers are those that Google publishes for each generation; the clock is
that which makes the published FLOP/s of its matrix units."""


@dataclass(frozen=True)
class Topology:
    """Chips, and how they are arranged."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """How many chips there are."""
        return prod(self.shape)

    @property
    def options(self) -> dict[str, Any]:
        """What JAX wants beside the name: a single chip is no host of its own in its tables."""
        return {"chips_per_host_bounds": [1, 1, 1]} if self.num_devices == 1 else {}


def _nearest(name: str) -> str:
    """Return a question whether the topology with the most similar name was meant; nothing where none is similar."""
    examples = [example for chip in CHIPS.values() for example in chip.examples]
    found = get_close_matches(name.lower(), examples, n=1, cutoff=0.5)
    return f"did you mean {found[0]}? Otherwise " if found else ""


def find_topology(name: str) -> Topology:
    """Return a topology by its name.

    Args:
        name: Such as `v5e:2x4` or `v5p:4x4x4`.

    Raises:
        ConfigError: There is none of that name.
    """
    known = "; ".join(", ".join(chip.examples) for chip in CHIPS.values())
    chip, _, shape = name.partition(":")
    if chip not in CHIPS:
        raise ConfigError(f"--compile-for {shown(name)}: there is no such chip; {_nearest(name)}there are {known}")
    found = CHIPS[chip]
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", shape) or shape.count("x") != found.num_dims - 1:
        raise ConfigError(
            f"--compile-for {shown(name)}: {found.name}s are arranged in {found.num_dims} dimensions; write how many "
            f"there are along each, such as {', '.join(found.examples)}"
        )
    topology = Topology(name, found, tuple(map(int, shape.split("x"))))
    if topology.num_devices > 1 and any(size % each for size, each in zip(topology.shape, found.host, strict=True)):
        raise ConfigError(
            f"--compile-for {shown(name)}: a machine has {'x'.join(map(str, found.host))} {found.name}s, and this is "
            f"no number of machines along each dimension; write one such as {', '.join(found.examples)}"
        )
    return topology
