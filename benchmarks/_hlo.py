"""Read what XLA writes about a compiled program: its buffers, and its collectives.

With `--xla_dump_to=FOLDER --xla_dump_hlo_as_text` XLA writes a program after its optimizations, and how its buffers are
assigned, for each compile. Under SPMD the program is that of one device, and so are all bytes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_ALLOCATION = re.compile(r"allocation \d+: size (\d+), ?(.*)")
_SHAPE = re.compile(r"(f64|f32|bf16|f16|s64|u64|s32|u32|s8|u8|pred)\[([\d,]*)\]")
_BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1}


@dataclass(frozen=True)
class Buffers:
    """Bytes that one device needs for a program."""

    parameters: int
    """How many tensors come in."""
    argument: int
    """What comes in: parameters, optimizer state, and the batch."""
    updated: int
    """The part of it that the program writes its results over: parameters and optimizer state."""
    temp: int
    """All that lives only while it runs: activations, gradients, gathered weights."""
    total: int
    """Everything, results and constants included."""


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a program."""

    count: int
    size: int
    """Bytes of their results on one device."""


def take_programs(dump: Path) -> list[tuple[str, str]]:
    """Return buffer assignment and text of the programs compiled since the last call, and delete what XLA wrote."""
    ending = "-buffer-assignment.txt"
    found = sorted(dump.glob(f"*.cpu_after_optimizations{ending}"))
    programs = [(path.read_text(), Path(str(path).removesuffix(ending) + ".txt").read_text()) for path in found]
    for path in dump.iterdir():
        path.unlink()
    return programs


def read_buffers(assignment: str) -> Buffers:
    """Read a `*-buffer-assignment.txt`."""
    parameters = argument = updated = temp = total = 0
    for line in assignment.splitlines():
        found = _ALLOCATION.match(line)
        if not found:
            continue
        size, about = int(found[1]), found[2]
        total += size
        if about.startswith("parameter"):
            parameters += 1
            argument += size
            updated += size if "maybe-live-out" in about else 0
        elif "maybe-live-out" not in about and "constant" not in about:
            temp += size
    return Buffers(parameters, argument, updated, temp, total)


def read_traffic(program: str) -> dict[str, Traffic]:
    """Count the collectives in a program's text, by kind; kinds that it has none of are left out."""
    found = {}
    for kind in COLLECTIVES:
        results = re.findall(rf"= (.*?) {kind}(?:-start)?\(", program)
        if results:
            found[kind] = Traffic(len(results), sum(map(_size, results)))
    return found


def training_program(programs: Iterable[tuple[str, str]]) -> tuple[Buffers, dict[str, Traffic]]:
    """Return what is known of the last program that takes the most tensors, which is a training step.

    Args:
        programs: Buffer assignment and text of each compiled program, in the order of the compiles.
    """
    read = [(read_buffers(assignment), program) for assignment, program in programs]
    most = max(buffers.parameters for buffers, _ in read)
    buffers, program = [each for each in read if each[0].parameters == most][-1]
    return buffers, read_traffic(program)


def _size(shapes: str) -> int:
    """Return the bytes of a shape, or of all in a tuple of them."""
    return sum(_BYTES[kind] * prod(map(int, filter(None, dims.split(",")))) for kind, dims in _SHAPE.findall(shapes))
