"""What a compiled step says of itself: memory, exchanges between devices, and bounds of its time."""

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchacc.aot.compiler import CompiledStep
from torchacc.aot.scheduled_program import COLLECTIVES, Collective, Instruction, ScheduledProgram
from torchacc.aot.topologies import Topology
from torchacc.engines.xla import tpu

NUM_VALUES = 12
"""How many of the largest values are listed."""
_AFTER_FORWARD = "backward or the optimizer"
_IN_PLACE = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
"""Operations that make no value of their own."""


@dataclass(frozen=True)
class LargeValue:
    """A value that the program computes."""

    num_bytes: int
    shape: str
    module: str
    """Whose forward computes it, by the module's name in the model with `*` for a layer's number; or what follows."""
    count: int
    """How many there are, not all at the same time."""


@dataclass(frozen=True)
class Exchange:
    """All exchanges between devices of one kind."""

    kind: str
    group_size: int
    count: int
    num_bytes: int
    """That one device sends, all together."""
    num_asynchronous: int
    """How many run while the device computes."""
    exposed_seconds: float | None
    """Of the wire's time at its published speed, what no computation covers by the compiler's cycles, if any."""


@dataclass(frozen=True)
class StepReport:
    """What is known of a step on each device of a topology. Seconds are estimates, never checked on hardware."""

    topology: str
    num_devices: int
    chip: str
    memory: Mapping[str, int]
    """Bytes: `arguments` (weights, optimizer state, batch), `temporary`, and `outputs` that are new."""
    peak_bytes: int
    device_bytes: int
    """What a program may have of a device's memory."""
    refuses_too_large: bool
    """Whether the compiler refuses a program that it finds no room for, as that of TPUs does."""
    planned_bytes: int | None
    """What the memory plan says without a compiler; None where it cannot plan the step."""
    largest: Sequence[LargeValue]
    exchanges: Sequence[Exchange]
    flops: float
    bytes_accessed: float
    compute_seconds: float
    """At the chip's published FLOP/s."""
    memory_seconds: float
    """At the published bandwidth of its memory."""
    wire_seconds: float
    """Of all exchanges, at the published bandwidth of its links."""
    cycles: int | None
    """The compiler's own estimate; None where it makes none, as that of GPUs."""
    cycle_seconds: float | None
    compile_seconds: float
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON: sizes in bytes, times in seconds."""
        return asdict(self)

    def as_text(self) -> str:
        """Return it for a terminal."""
        lines = self._summary()
        lines += ["", "largest values", *_table(self._values())]
        lines += ["", "exchanges between devices", *_table(self._exchanges())]
        lines += ["", f"bounds of a step, {self._basis()}"]
        return "\n".join([*lines, *_table(self._bounds())])

    def _summary(self) -> list[str]:
        parts = ", ".join(f"{name} {in_gibibytes(size)}" for name, size in self.memory.items())
        share = self.peak_bytes / self.device_bytes
        # What a compiler sums up that finds room for it may be more than lives at one time.
        too_large = "compiled, but sums up to more than a device has" if self.refuses_too_large else "does not fit"
        verdict = "fits" if share <= 1 else too_large
        lines = [
            f"compiled for {self.topology}: {self.num_devices} x {self.chip}, in {self.compile_seconds:.0f} s "
            f"({', '.join(f'{name} {number}' for name, number in self.versions.items())})",
            f"{verdict}: {in_gibibytes(self.peak_bytes)} of {in_gibibytes(self.device_bytes)} on each device "
            f"({share:.0%}): {parts}",
        ]
        if self.planned_bytes is not None:
            lines.append(
                f"planned without a compiler: {in_gibibytes(self.planned_bytes)}, "
                f"{self.planned_bytes / self.peak_bytes:.2f} of that"
            )
        return lines

    def as_html(self, title: str) -> str:
        """Return it as a page of its own."""
        parts = [(name, float(size), in_gibibytes(size)) for name, size in self.memory.items()]
        parts.append(("free", float(max(0, self.device_bytes - self.peak_bytes)), ""))
        times = [(what, seconds, _in_milliseconds(seconds)) for what, seconds in self._estimates()]
        body = [
            f"<h1>{html.escape(title)} on {self.topology}</h1>",
            f"<pre>{html.escape(chr(10).join(self._summary()))}</pre>",
            "<h2>Memory of a device</h2>",
            _bars(
                [
                    *parts,
                    *(
                        [("planned", float(self.planned_bytes), in_gibibytes(self.planned_bytes))]
                        if self.planned_bytes
                        else []
                    ),
                ]
            ),
            f"<h2>Bounds of a step, {self._basis()}</h2>",
            _bars(times),
            "<h2>Largest values</h2>",
            _html_table(self._values()),
            "<h2>Exchanges between devices</h2>",
            _html_table(self._exchanges()),
        ]
        return _PAGE.format(title=html.escape(title), body="\n".join(body))

    def _values(self) -> list[list[str]]:
        return [[f"{each.count} x", in_gibibytes(each.num_bytes), each.shape, each.module] for each in self.largest]

    def _exchanges(self) -> list[list[str]]:
        return [
            [
                f"{each.count} {each.kind}",
                f"of {each.group_size}" if each.group_size > 1 else "of two",
                in_gibibytes(each.num_bytes),
                f"{each.num_asynchronous} beside work",
                *([] if each.exposed_seconds is None else [f"{_in_milliseconds(each.exposed_seconds)} exposed"]),
            ]
            for each in self.exchanges
        ]

    def _basis(self) -> str:
        last = "" if self.cycles is None else "; the last by the compiler"
        return f"by published speeds{last}. Estimates, never run"

    def _estimates(self) -> list[tuple[str, float]]:
        found = [
            (f"compute, {self.flops / 1e12:.2f} TFLOP", self.compute_seconds),
            (f"memory, {in_gibibytes(self.bytes_accessed)} moved", self.memory_seconds),
            (f"wire, {in_gibibytes(sum(each.num_bytes for each in self.exchanges))} sent", self.wire_seconds),
        ]
        if self.cycles is not None and self.cycle_seconds is not None:
            found.append((f"compiler, {self.cycles / 1e6:.1f} M cycles", self.cycle_seconds))
        return found

    def _bounds(self) -> list[list[str]]:
        return [[what, _in_milliseconds(seconds)] for what, seconds in self._estimates()]


def make_report(compiled: CompiledStep, topology: Topology, device_bytes: int, planned_bytes: int | None) -> StepReport:
    """Return what a compiled step says of itself.

    Args:
        compiled: For the topology.
        topology: The devices.
        device_bytes: What a program may have of a device's memory.
        planned_bytes: Of a device, by the memory plan.
    """
    program, chip = compiled.program(), topology.chip
    cycles = None if chip.clock_hz is None else program.cycles
    collectives = list(program.collectives())
    exchanges = _sum_up(collectives, topology)
    return StepReport(
        topology=topology.name,
        num_devices=topology.num_devices,
        chip=chip.name,
        memory={
            "arguments": compiled.argument_bytes,
            "temporary": compiled.temp_bytes,
            "outputs": compiled.output_bytes - compiled.alias_bytes,
        },
        peak_bytes=compiled.peak_bytes,
        device_bytes=device_bytes,
        refuses_too_large=chip.platform == tpu.PLATFORM,
        planned_bytes=planned_bytes,
        largest=_largest(program),
        exchanges=exchanges,
        flops=compiled.flops,
        bytes_accessed=compiled.bytes_accessed,
        compute_seconds=compiled.flops / chip.flops_per_second,
        memory_seconds=compiled.bytes_accessed / chip.memory_bytes_per_second,
        wire_seconds=sum(_wire_seconds(each, topology) for each in collectives),
        cycles=cycles,
        cycle_seconds=None if chip.clock_hz is None else program.cycles / chip.clock_hz,
        compile_seconds=compiled.seconds,
        versions=compiled.versions,
    )


def in_gibibytes(num_bytes: float) -> str:
    """Return a number of bytes as a person reads it."""
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _in_milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _makes_value(instruction: Instruction) -> bool:
    """Return whether an instruction makes a value of its own: the end of an exchange does, that of a copy does not."""
    if instruction.op.endswith(("-start", "-done")):
        return instruction.op.removesuffix("-done") in COLLECTIVES
    return instruction.op not in _IN_PLACE


def _largest(program: ScheduledProgram) -> list[LargeValue]:
    found: Counter[tuple[int, str, str]] = Counter()
    for each, _ in program.runs():
        if _makes_value(each) and each.array_bytes:
            size = max(each.array_bytes)
            shape = each.arrays[each.array_bytes.index(size)]
            found[size, shape, re.sub(r"\b\d+\b", "*", each.module) or _AFTER_FORWARD] += 1
    return [LargeValue(*value, count) for value, count in sorted(found.items(), reverse=True)[:NUM_VALUES]]


def _wire_seconds(exchange: Collective, topology: Topology) -> float:
    return exchange.wire_bytes / topology.wire_bytes_per_second(exchange.groups)


def _sum_up(collectives: Sequence[Collective], topology: Topology) -> list[Exchange]:
    groups: dict[tuple[str, int], list[Collective]] = {}
    for each in collectives:
        groups.setdefault((each.kind, each.group_size), []).append(each)

    def exposed(found: Sequence[Collective], clock_hz: float | None) -> float | None:
        if clock_hz is None:
            return None
        spent = ((_wire_seconds(each, topology), each.cycles_beside / clock_hz) for each in found)
        return sum(max(0.0, wire - beside) for wire, beside in spent)

    order = sorted(groups, key=lambda key: (COLLECTIVES.index(key[0]), key[1]))
    return [
        Exchange(
            kind=kind,
            group_size=size,
            count=len(found),
            num_bytes=int(sum(each.wire_bytes for each in found)),
            num_asynchronous=sum(each.is_asynchronous for each in found),
            exposed_seconds=exposed(found, topology.chip.clock_hz),
        )
        for (kind, size), found in ((key, groups[key]) for key in order)
    ]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _bars(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return horizontal bars, each with its name and what it stands for."""
    most = max((size for _, size, _ in rows), default=0) or 1
    lines = [
        f'<text x="0" y="{24 * row + 16}">{html.escape(name)}</text>'
        f'<rect x="260" y="{24 * row + 4}" width="{max(1, 420 * size / most):.0f}" height="16"/>'
        f'<text x="{268 + 420 * size / most:.0f}" y="{24 * row + 16}">{html.escape(label)}</text>'
        for row, (name, size, label) in enumerate(rows)
    ]
    return f'<svg width="800" height="{24 * len(rows) + 8}">{"".join(lines)}</svg>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 60em; color: #222 }}
table {{ border-collapse: collapse }} td {{ padding: 2px 14px 2px 0; border-bottom: 1px solid #ddd }}
rect {{ fill: #4477aa }} pre {{ white-space: pre-wrap }}
</style></head><body>
{body}
</body></html>
"""
