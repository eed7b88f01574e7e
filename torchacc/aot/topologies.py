"""What a program can be compiled for: names such as `v5e:2x4` and `h100x8`, and what their chips are."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from torchacc.engines.xla import cuda, tpu
from torchacc.errors import ConfigError, shown
from torchacc.layouts import DEVICES
from torchacc.parallel.device_order import Place, order_devices


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
    clock_hz: float | None
    """Of the core, by which the compiler's cycles become seconds; None where the compiler estimates none."""
    examples: tuple[str, ...]
    host: tuple[int, ...]
    """The chips of one machine, along each dimension."""
    platform: str = tpu.PLATFORM
    """As PJRT_DEVICE names it."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What JAX wants to know beside the topology's name."""
    far_bytes_per_second: float | None = None
    """That it sends to chips of other machines; None where its links lead there as well."""


def _gpu(key: str) -> Chip:
    """Return a GPU with the figures by which layouts are ranked, alone, in a machine, and in several."""
    figures = DEVICES[key]
    assert figures.memory_bytes is not None, figures
    return Chip(
        name=f"NVIDIA {figures.name}",
        num_dims=1,
        flops_per_second=figures.flops_per_second,
        memory_bytes=figures.memory_bytes,
        memory_bytes_per_second=figures.memory_bytes_per_second,
        wire_bytes_per_second=figures.near_bytes_per_second,
        clock_hz=None,
        examples=tuple(f"{key}x{number}" for number in (1, 2, 4, 8, 64, 512)),
        host=(figures.devices_per_machine,),
        platform=cuda.PLATFORM,
        far_bytes_per_second=figures.far_bytes_per_second,
    )


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(
        "TPU v4",
        3,
        275e12,
        32 * 2**30,
        1228e9,
        300e9,
        1.05e9,
        ("v4:2x2x1", "v4:4x4x4"),
        (2, 2, 1),
        options={"chip_config_name": "megacore"},  # the two cores of a chip are one device, as on a TPU VM
    ),
    "v5e": Chip("TPU v5e", 2, 197e12, 16 * 2**30, 819e9, 200e9, 1.5e9, ("v5e:2x2", "v5e:2x4", "v5e:16x16"), (2, 2)),
    "v5p": Chip(
        "TPU v5p", 3, 459e12, 95 * 2**30, 2765e9, 600e9, 1.75e9, ("v5p:2x2x1", "v5p:4x4x4", "v5p:8x8x8"), (2, 2, 1)
    ),
    "v6e": Chip("TPU v6e", 2, 918e12, 32 * 2**30, 1640e9, 448e9, 1.75e9, ("v6e:2x4", "v6e:4x4", "v6e:16x16"), (2, 2)),
    "h100": _gpu("h100"),
}
"""By the first part of a topology's name. The numbers are those that Google and NVIDIA publish; a TPU's clock is that
which makes the published FLOP/s of its matrix units."""


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

    def places_on(self, axes: Sequence[int]) -> list[Place]:
        """Return where the devices of a mesh lie, as the engine puts them there; an empty list where all are alike.

        Args:
            axes: The sizes of the mesh's axes, the slowest first.
        """
        if self.chip.platform != tpu.PLATFORM or not axes:
            return []
        shape = (1, *self.shape, *(1,) * (3 - len(self.shape)), 1)
        places = list(product(*map(range, shape)))
        return [places[device] for device in order_devices(places, axes)]

    def device_bytes(self, gpu_fraction: float | None) -> int:
        """Return how much memory of each device a program may have.

        Args:
            gpu_fraction: Of a GPU's memory, by the config; None for what XLA takes by itself.
        """
        if self.chip.platform != cuda.PLATFORM:
            return self.chip.memory_bytes
        return int(self.chip.memory_bytes * (cuda.MEMORY_FRACTION if gpu_fraction is None else gpu_fraction))

    def wire_bytes_per_second(self, groups: Sequence[Sequence[int]]) -> float:
        """Return how fast a device can send what its group exchanges in a ring.

        Between machines each device has a way of its own, and a ring takes those of all its devices of a machine.

        Args:
            groups: The devices of each group; empty where all of them are one.
        """
        chip = self.chip
        if chip.far_bytes_per_second is None:
            return chip.wire_bytes_per_second
        machines = [Counter(device // chip.host[0] for device in each) for each in groups or [range(self.num_devices)]]
        ways = min((min(each.values()) for each in machines if len(each) > 1), default=None)
        far = None if ways is None else ways * chip.far_bytes_per_second
        return chip.wire_bytes_per_second if far is None else min(far, chip.wire_bytes_per_second)

    @property
    def options(self) -> dict[str, Any]:
        """What JAX wants beside the name."""
        if self.chip.platform == cuda.PLATFORM:
            described = Path(__file__).with_name(self.name.partition("x")[0] + ".txtpb")
            each = min(self.num_devices, *self.chip.host)
            machines = f"1x{self.num_devices // each}x{each}"
            return {"topology": machines, "target_config": described.read_text(encoding="utf-8")}
        # A single chip is not a host of its own in JAX's tables.
        return {**self.chip.options, **({"chips_per_host_bounds": [1, 1, 1]} if self.num_devices == 1 else {})}


def _nearest(name: str) -> str:
    """Return a question whether the topology with the most similar name was meant; nothing where none is similar."""
    examples = [example for chip in CHIPS.values() for example in chip.examples]
    found = get_close_matches(name.lower(), examples, n=1, cutoff=0.5)
    return f"did you mean {found[0]}? Otherwise " if found else ""


def find_topology(name: str) -> Topology:
    """Return a topology by its name.

    Args:
        name: Such as `v5e:2x4`, `v5p:4x4x4` or `h100x8`.

    Raises:
        ConfigError: There is none of that name.
    """
    key = next((key for key in CHIPS if re.match(rf"{key}($|[:x])", name)), None)
    if key is None:
        known = "; ".join(", ".join(chip.examples) for chip in CHIPS.values())
        raise ConfigError(f"--compile-for {shown(name)}: there is no such chip; {_nearest(name)}there are {known}")
    chip = CHIPS[key]
    shape = _shape_of_gpus(name, chip) if chip.platform == cuda.PLATFORM else _shape_of_tpus(name, chip)
    return Topology(name, chip, shape)


def _shape_of_gpus(name: str, chip: Chip) -> tuple[int, ...]:
    (each,) = chip.host
    found = re.fullmatch(r"\w+x([1-9]\d{0,3})", name)
    number = int(found[1]) if found else 0
    if name not in chip.examples and (number == 0 or number % each):
        raise ConfigError(
            f"--compile-for {shown(name)}: a machine has {each} x {chip.name}; write how many of one machine's there "
            f"are, or a multiple of {each} for several, such as {', '.join(chip.examples)}"
        )
    return (number,)


def _shape_of_tpus(name: str, chip: Chip) -> tuple[int, ...]:
    text = name.partition(":")[2]
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", text) or text.count("x") != chip.num_dims - 1:
        raise ConfigError(
            f"--compile-for {shown(name)}: {chip.name}s are arranged in {chip.num_dims} dimensions; write how many "
            f"there are along each, such as {', '.join(chip.examples)}"
        )
    shape = tuple(map(int, text.split("x")))
    if prod(shape) > 1 and any(size % each for size, each in zip(shape, chip.host, strict=True)):
        raise ConfigError(
            f"--compile-for {shown(name)}: a machine has {'x'.join(map(str, chip.host))} {chip.name}s, and this is "
            f"no number of machines along each dimension; write one such as {', '.join(chip.examples)}"
        )
    return shape
