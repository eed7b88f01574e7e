"""What every benchmark hands over: one `Report`, printed as Markdown and, with `--json FILE`, written as JSON.

A program makes a `Report` of what it measured and ends with `emit()`. `python -m benchmarks report` renders the
committed ones. Sentences in `reading` are made from the measured numbers, never typed.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple

from _machine import QUIET_CORES, ROOT, machine_facts
from _markdown import render_table
from pydantic import TypeAdapter

STARTED = time.perf_counter()

Verdict = Literal["held", "missed", "reported"]


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        around = f" ({self.low:.3f} .. {self.high:.3f})" if self.low < self.high else ""
        return f"{self.middle:.3f}{around}"


@dataclass(kw_only=True)
class Table:
    """A table of the report, its cells as they are printed."""

    title: str
    """What is in it, with its units."""
    header: list[str]
    rows: list[list[str]]
    note: str | None = None
    """A sentence below it."""


@dataclass
class Check:
    """What was expected, and whether it holds."""

    text: str
    """What is expected and what was measured."""
    verdict: Verdict
    reason: str | None = None
    """Why it does not hold, as far as known; shown only where it does not."""

    @classmethod
    def of(cls, text: str, holds: bool, reason: str | None = None) -> "Check":
        """Make one that either holds or does not."""
        return cls(text, "held" if holds else "missed", reason)

    def __str__(self) -> str:
        return f"{self.text}: {self.verdict.upper() if self.verdict != 'reported' else 'reported only'}"


@dataclass(frozen=True)
class Limit:
    """What part of a reference's number a case's may be at most."""

    case: str
    reference: str
    part: float | None
    """None where the ratio is only reported."""
    reason: str | None = None
    """Why it may be more, as far as known."""

    def judge(self, what: str, ratios: Sequence[float], *, failed: bool = False) -> Check:
        """Return what is expected of a number, what was measured, and whether that holds.

        Args:
            what: The number's name.
            ratios: The case's over the reference's, by round; none where they were not measured.
            failed: Whether that is because one of them failed.
        """
        expected = "no limit" if self.part is None else f"<= {self.part:.2f}"
        text = f"{what} of {self.case} / {self.reference} {expected}"
        if not ratios:
            return Check(f"{text}, not measured", "missed" if failed else "reported")
        found = spread(ratios)
        if self.part is None:
            return Check(f"{text}, is {found}", "reported")
        unsure = ", within the noise" if found.low <= self.part < found.high else ""
        return Check.of(f"{text}, is {found}{unsure}", found.middle <= self.part, self.reason)


@dataclass(kw_only=True)
class Comparison:
    """One number of ours beside a rival's, where larger is worse. `compare()` makes it."""

    what: str
    """What was compared, such as `step time of native on 2 processes`."""
    rival: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    """Ours over theirs: the median over rounds where there were several."""
    spread: tuple[float, float] | None = None
    """The quartiles of the ratio; None for numbers that are exact."""
    reason: str | None = None
    """Why ours is the larger one, as far as known; None where it is not."""
    compiles: bool = False
    """Whether ours is a time in which programs are compiled, and theirs is not."""
    same_runtime: bool = True
    """Whether both run on the same runtime, XLA's or PyTorch's own; other ratios depend on the machine far more."""
    earlier: list[float] = field(default_factory=list)
    """The ratios of earlier runs, which may have been on other machines."""

    @property
    def loses(self) -> bool:
        """Whether ours is larger beyond the noise, and by enough to be seen in a ratio of two decimals."""
        return round(self.ratio, 2) > 1 and (self.spread is None or self.spread[0] > 1)


@dataclass(kw_only=True)
class Series:
    """A line, or the bars, of a plot; those with the same `plot` share one."""

    plot: str
    label: str
    x: list[float] | list[str]
    """Numbers for a line, names for bars."""
    y: list[float]
    x_label: str
    y_label: str


@dataclass(kw_only=True)
class Report:
    """All that one benchmark has to say."""

    name: str
    """That of its program, without the ending."""
    title: str
    setting: str
    """The workload, in a sentence or two: model, batch, precision, rounds."""
    command: str = field(default_factory=lambda: own_command(sys.argv))
    machine: dict[str, Any] = field(default_factory=machine_facts)
    other_cores: float | None = None
    """Cores that were busy with anything else, the median over what was timed; None where it is unknown."""
    quiet: bool = True
    """Whether times can be quoted; `emit()` sets it."""
    secs: float = 0.0
    """How long the program ran; `emit()` sets it."""
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    reading: list[str] = field(default_factory=list)
    """What the numbers say, in sentences made from them."""


_REPORT = TypeAdapter(Report)


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of one value or more."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(low, median(values), high)


def compare(
    what: str,
    rival: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    unit: str,
    *,
    reason: str | None = None,
    compiles: bool = False,
    same_runtime: bool = True,
) -> Comparison:
    """Compare what was measured in the same rounds; a single exact number each has no spread.

    Args:
        what: What was compared, to be read before "against" and the rival's name.
        rival: Whom it was compared with.
        ours: Our numbers by round, or the one exact number.
        theirs: The rival's, for the same rounds.
        unit: Of both.
        reason: Why ours is larger, as far as known; it is kept only where ours is.
        compiles: Whether ours is a time in which programs are compiled, and theirs is not.
        same_runtime: Whether both run on the same runtime.
    """
    ratios = spread([own / other for own, other in zip(ours, theirs, strict=True)])
    found = Comparison(
        what=what,
        rival=rival,
        ours=median(ours),
        theirs=median(theirs),
        unit=unit,
        ratio=ratios.middle,
        spread=(ratios.low, ratios.high) if len(ours) > 1 else None,
        compiles=compiles,
        same_runtime=same_runtime,
    )
    found.reason = reason if found.loses else None
    return found


def emit(report: Report, path: Path | None) -> None:
    """Print a report, and write it as JSON where a path is given."""
    report.quiet = report.other_cores is None or report.other_cores <= QUIET_CORES
    report.secs = round(time.perf_counter() - STARTED, 1)
    sys.stdout.write(to_markdown(report))
    if path is not None:
        write(report, path)


def keep_earlier(report: Report, earlier: Report) -> None:
    """Put the ratios of earlier runs beside those of a new one."""
    before = {(each.what, each.rival): [*each.earlier, each.ratio] for each in earlier.comparisons}
    for each in report.comparisons:
        each.earlier = before.get((each.what, each.rival), [])


def write(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_REPORT.dump_json(report, indent=1) + b"\n")


def read(path: Path) -> Report:
    """Read a report that `emit()` wrote."""
    return _REPORT.validate_json(path.read_bytes())


def to_markdown(report: Report) -> str:
    """Return what a program prints: its tables, what they say, and its checks."""
    blocks = [
        f"## {report.title}",
        f"{report.setting} `{report.command}`, {report.secs:.0f} s; {trust(report)}.",
        *report_body(report),
        "\n".join(f"- {line}" for line in report.reading),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def report_body(report: Report) -> list[str]:
    """Return the tables and the checks, in blocks of Markdown."""
    blocks = []
    for table in report.tables:
        blocks += [f"{table.title}:", render_table(table.header, table.rows), table.note or ""]
    return [*filter(None, blocks), "\n".join(f"- {check}" for check in report.checks)]


def trust(report: Report) -> str:
    """Say how far a report's times can be trusted."""
    if report.other_cores is None:
        return "what else the machine did is not known"
    quiet = "" if report.quiet else ": **the machine was not quiet**, do not quote its times"
    return f"other work took {report.other_cores:.2f} cores{quiet}"


def own_command(argv: Sequence[str]) -> str:
    """Return the command that this program was started with, without where it writes its JSON."""
    program, *arguments = argv
    if "--json" in arguments:
        at = arguments.index("--json")
        del arguments[at : at + 2]
    path = Path(program).resolve()
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return shlex.join(["python", str(name), *arguments])
