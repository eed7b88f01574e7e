"""The layouts between which a checkpoint goes back and forth, and which of the pairs are tried in which order."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from typing import Any

from covering import Pair, covering, pairs


@dataclass(frozen=True)
class Layout:
    """An engine and its devices."""

    kind: str
    num_devices: int
    dp: int = 1
    flat: bool = False

    @property
    def num_processes(self) -> int:
        return 1 if self.kind == "xla-spmd" else self.num_devices

    @property
    def is_launched(self) -> bool:
        return self.num_processes > 1 or self.kind == "xla-multiprocess"

    def config(self) -> dict[str, Any]:
        fsdp = {
            "size": self.num_devices // self.dp,
            "use_spmd": self.kind == "xla-spmd",
            "flatten_parameters": self.flat,
        }
        if self.dp > 1:
            fsdp["sharding_strategy"] = "HYBRID_SHARD"
        return {"backend": self.kind.partition("-")[0], "dist": {"dp": {"size": self.dp}, "fsdp": fsdp}}


LAYOUTS = {
    f"{kind}-{num_devices}": Layout(kind, num_devices)
    for kind in ("native", "xla-multiprocess", "xla-spmd")
    for num_devices in (1, 2, 4)
} | {
    "native-4-hybrid": Layout("native", 4, dp=2),
    "xla-multiprocess-2-flat": Layout("xla-multiprocess", 2, flat=True),
}

ORDER = [
    "native-4-hybrid",
    "xla-multiprocess-2-flat",
    "native-1",
    "xla-multiprocess-2",
    "xla-spmd-4",
    "native-2",
    "xla-multiprocess-4",
    "xla-spmd-1",
    "native-4",
    "xla-multiprocess-1",
    "xla-spmd-2",
]
"""In which they are launched: each saves, and loads what there is by then. Engines and sizes take turns."""

Way = tuple[str, str]
"""The layout that saved, and the one that loads."""


@dataclass
class Launch:
    """What the processes of a layout do: save, and then load what these have saved."""

    name: str
    saves: bool
    loads: list[str]


def every_way() -> dict[Way, set[Pair]]:
    """Return all ways from one layout to another with what each has of both; those of a first launch come first."""
    ways = [*combinations_with_replacement(ORDER, 2), *product(ORDER, ORDER)]
    return {(saved, name): _pairs(saved, name) for saved, name in ways}


def chosen_ways() -> list[Way]:
    """Return ways in which each layout is saved for, and loaded by, each engine and each number of devices.

    As few as possible are not of a layout's first launch, as a second one costs more than what it loads.
    """
    every = every_way()
    at_first = {way: every[way] for way in combinations_with_replacement(ORDER, 2)}
    return covering(every, covering(at_first))


def _pairs(saved: str, name: str) -> set[Pair]:
    """Return the pairs of a way, but that of both layouts by name, which no other way has."""
    values = {
        f"{what} {of}": [value]
        for of, each in (("saved", saved), ("loads", name))
        for what, value in (("layout", each), ("engine", LAYOUTS[each].kind), ("number", LAYOUTS[each].num_devices))
    }
    return pairs(values) - {frozenset([("layout saved", saved), ("layout loads", name)])}


def launches(ways: Iterable[Way]) -> list[Launch]:
    """Return what has to be launched, and in which order, to go these ways."""
    left = set(ways)
    found, there = [], []
    for name in [*ORDER, *ORDER]:
        saves = name not in there and any(saved == name for saved, _ in left)
        there += [name] if saves else []
        loads = [saved for saved in there if (saved, name) in left]
        left -= {(saved, name) for saved in loads}
        if saves or loads:
            found.append(Launch(name, saves, loads))
    return found
