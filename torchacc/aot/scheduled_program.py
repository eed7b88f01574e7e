"""Read the text of a program that XLA has optimized and scheduled for one device of several.

The order of a scheduled computation is the order in which it runs. A TPU's compiler leaves its estimate of each
instruction's cycles in the text; none of them was ever checked on hardware. That of GPUs leaves none.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16} | {
    "f32": 32,
    "s32": 32,
    "u32": 32,
    "f64": 64,
    "s64": 64,
    "u64": 64,
    "f8e4m3fn": 8,
    "f8e5m2": 8,
}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_OPERATIONS = ("aten__", "xla__", "prim__")
"""How torch_xla begins the names of its own operations, which stand beside those of modules."""
_SCOPE_NUMBER = re.compile(r"\.\d+$")


@dataclass(frozen=True)
class Instruction:
    """One line of a program."""

    name: str
    shape: str
    op: str
    rest: str
    """Operands and attributes, as they are written."""

    @cached_property
    def arrays(self) -> Sequence[str]:
        """The dtype and shape of each array that it returns, such as `bf16[8,1024]`."""
        return [f"{dtype}[{dims}]" for dtype, dims in _ARRAY.findall(self.shape)]

    @cached_property
    def array_bytes(self) -> Sequence[int]:
        """Of each array that it returns."""
        arrays = _ARRAY.findall(self.shape)
        return [prod(map(int, filter(None, dims.split(",")))) * _BITS.get(dtype, 0) // 8 for dtype, dims in arrays]

    @cached_property
    def result_bytes(self) -> int:
        """Of all arrays that it returns together; of the start of an exchange, what the exchange will return."""
        sizes = self.array_bytes
        if self.op.endswith("-start") and self.op != "all-reduce-start":  # operands, results, and numbers of its own
            arrays = [size for size, array in zip(sizes, self.arrays, strict=True) if array != "u32[]"]
            sizes = arrays[len(arrays) // 2 :]
        return sum(sizes)

    @cached_property
    def operands(self) -> Sequence[str]:
        """The names of the instructions whose results it takes."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition("), ")[0])

    @cached_property
    def called(self) -> Sequence[str]:
        """The computations that it runs."""
        return _CALLED.findall(self.rest)

    @cached_property
    def cycles(self) -> int:
        """The compiler's estimate, without that of what it calls."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
        return int(found[1]) if found else 0

    @property
    def module(self) -> str:
        """The module of the model whose forward it is of, by its name; empty for what follows."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        scopes = reversed(found[1].split("/")[:-1] if found else [])
        # A kernel's own scopes have no number.
        names = (_SCOPE_NUMBER.sub("", scope) for scope in scopes if _SCOPE_NUMBER.search(scope))
        return next((name for name in names if not name.startswith(_OPERATIONS)), "")

    @property
    def group_size(self) -> int:
        """How many devices exchange something with each other."""
        if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", self.rest):
            return listed[1].count(",") + 1
        counted = re.search(r"replica_groups=\[\d+,(\d+)\]", self.rest)
        return int(counted[1]) if counted else 1

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """The devices that exchange something with each other; empty where that are all of them."""
        if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", self.rest):
            return [list(map(int, each.split(","))) for each in re.findall(r"[\d,]+(?=\})", listed[1])]
        counted = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", self.rest)
        if counted is None:
            return []
        dims = list(map(int, counted[2].split(",")))
        order = map(int, counted[3].split(",")) if counted[3] else range(len(dims))
        # Along each dimension, the slowest first: how far its steps are apart in numbers of devices.
        steps = [range(0, prod(dims[axis:]), prod(dims[axis + 1 :])) for axis in order]
        devices, size = [sum(place) for place in product(*steps)], int(counted[1])
        return [devices[start : start + size] for start in range(0, len(devices), size)]

    def calls(self, role: str) -> str:
        """Return the computation that it runs as its `body` or `condition`."""
        found = re.search(rf"{role}=%?([\w.\-]+)", self.rest)
        assert found is not None, self
        return found[1]


@dataclass(frozen=True)
class Collective:
    """An exchange between devices, each time that it runs."""

    kind: str
    """One of `COLLECTIVES`."""
    num_bytes: int
    """Of its result on one device."""
    group_size: int
    groups: Sequence[Sequence[int]]
    """The devices that exchange something with each other; empty where that are all of them."""
    is_asynchronous: bool
    """Whether the device computes something else from its start to its end."""
    cycles_beside: int
    """Of what the device computes meanwhile, by the compiler's estimate."""

    @property
    def wire_bytes(self) -> float:
        """What one device sends, by a ring over its group."""
        if self.kind == "collective-permute":
            return self.num_bytes
        times = {"all-reduce": 2.0, "reduce-scatter": self.group_size}.get(self.kind, 1.0)
        return self.num_bytes * times * (self.group_size - 1) / self.group_size


@dataclass(frozen=True)
class ScheduledProgram:
    """A program in the order in which it runs."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str

    def runs(self) -> Iterator[tuple[Instruction, int]]:
        """Yield each instruction of the entry and of its loops, and how often it runs."""
        for sequence, times in self._sequences(self.entry, 1):
            yield from ((each, times) for each in sequence)

    def _sequences(self, computation: str, times: int) -> Iterator[tuple[Sequence[Instruction], int]]:
        """Yield a computation and the loops in it, and how often each runs."""
        sequence = self.computations[computation]
        yield sequence, times
        for each in sequence:
            if each.op == "while":
                yield from self._sequences(each.calls("body"), times * self._trips(each))

    def loops(self) -> Iterator[tuple[str, int]]:
        """Yield each loop's body, and how often it runs beyond the first time in each run of what it stands in."""
        for sequence, times in self._sequences(self.entry, 1):
            yield from (
                (each.calls("body"), times * (self._trips(each) - 1)) for each in sequence if each.op == "while"
            )

    def _trips(self, loop: Instruction) -> int:
        """Return how often a loop's body runs: as the compiler says, else what its counter stays below; else 1."""
        if (known := re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.rest)) is not None:
            return int(known[1])
        condition = {each.name: each for each in self.computations[loop.calls("condition")]}
        last = next(reversed(condition.values()))
        below = condition[last.operands[-1]] if last.op == "compare" and "direction=LT" in last.rest else last
        limit = re.match(r"\d+", below.rest) if below.op == "constant" else None
        return int(limit[0]) if limit else 1

    @cached_property
    def cycles(self) -> int:
        """The compiler's estimate of the whole program on one device."""
        return sum(each.cycles * times for each, times in self.runs())

    def collectives(self) -> Iterator[Collective]:
        """Yield each exchange as often as it runs."""
        for sequence, times in self._sequences(self.entry, 1):
            for place, each in enumerate(sequence):
                for kind, found in self._exchanged_by(each):
                    beside = sequence[place + 1 : _end(sequence, place)] if _is_start(each) else ()
                    num_bytes = found.result_bytes
                    if kind == "reduce-scatter" and found.op == "all-reduce":  # fused with the slice of its result
                        num_bytes //= found.group_size
                    cycles, is_beside_work = sum(other.cycles for other in beside), _is_beside_work(each)
                    one = Collective(kind, num_bytes, found.group_size, found.groups, is_beside_work, cycles)
                    yield from [one] * times

    def _exchanged_by(self, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Yield what an instruction exchanges by itself, or as a fusion; not what another has started."""
        kind = instruction.op.removesuffix("-start")
        if kind in COLLECTIVES:
            yield kind, instruction
        is_whole = instruction.op in ("fusion", "call", "async-start") and "-done" not in instruction.name
        for name in instruction.called if is_whole else ():
            for each in self.computations.get(name, ()):
                if "continuation" not in each.rest and "continuation" not in instruction.rest:
                    scatters = "all-reduce-scatter" in name
                    yield from (("reduce-scatter" if scatters else k, i) for k, i in self._exchanged_by(each))


def parse(text: str) -> ScheduledProgram:
    """Read the text of an optimized HloModule.

    Args:
        text: As XLA prints it.

    Raises:
        ValueError: It has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if (opened := _COMPUTATION.match(line)) is not None:
            current = computations.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)) is not None:
            current.append(Instruction(*found.groups()))
    if not entry:
        raise ValueError("the text has no entry computation")
    return ScheduledProgram(computations, entry)


def cut_out(text: str, computation: str) -> str:
    """Return the text of a program that runs only one computation of another, and what that calls.

    Args:
        text: Of an HloModule.
        computation: Its name.
    """
    blocks: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if (opened := _COMPUTATION.match(line)) is not None:
            current = blocks[opened[2]] = []
        current.append(line)
    reached = [computation]
    for name in reached:
        words = {word for line in blocks[name][1:] for word in re.findall(r"[\w.\-]+", line)}
        reached += (words & blocks.keys()).difference(reached)
    first = "\n".join(blocks[computation]).removeprefix("ENTRY ")
    others = ["\n".join(lines) for name, lines in blocks.items() if name in reached and name != computation]
    return "\n".join(["HloModule part", *others, f"ENTRY {first}"])  # what is called stands before what calls it


def _is_start(instruction: Instruction) -> bool:
    return instruction.op.endswith("-start") or instruction.name.startswith("async-collective-start")


def _is_beside_work(instruction: Instruction) -> bool:
    """Return whether an exchange is only started here; GPUs have a mark on one that nothing runs beside."""
    return _is_start(instruction) and '"is_sync":true' not in instruction.rest


def _end(sequence: Sequence[Instruction], start: int) -> int:
    """Return the place of the instruction that waits for what another has started."""
    reached = {sequence[start].name}
    for place in range(start + 1, len(sequence)):
        each = sequence[place]
        if reached.isdisjoint(each.operands):
            continue
        if each.op.endswith("-done") or each.name.startswith("async-collective-done"):
            return place
        reached.add(each.name)
    return start + 1
