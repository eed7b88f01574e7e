"""What is measured of cases that take turns, and how it becomes rows, checks and comparisons. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from _machine import median_cores
from _results import Check, Comparison, Limit, Series, compare, spread

LOSS_TOLERANCE = 1e-4
"""Largest relative difference between the losses of two cases after the same number of steps."""
LATE_TOLERANCE = 10 * LOSS_TOLERANCE
"""The same after fifty steps and more: engines round otherwise, and training multiplies what differs."""


@dataclass
class Block:
    """One case's turn in one round."""

    step_secs: float
    """Wall time of one step, that of the slowest process."""
    cpu_secs: float
    """CPU time of one step, of all processes of the case."""
    idle_cpu_secs: float
    """CPU time that the case took while it waited for this turn; it should be none."""
    wait_secs: float
    """Wall time that it waited."""
    other_cores: float | None
    """Cores that were busy meanwhile with what is not this benchmark; None where the system does not tell."""


@dataclass
class Result:
    """What has been measured of one case."""

    setup_secs: float = 0.0
    """Building and sharding the model."""
    first_steps: list[float] = field(default_factory=list)
    """Seconds of the first step, with all that is compiled for it, of each start."""
    compiles: int = 0
    """Programs compiled up to the first round."""
    late_compiles: int = 0
    """Programs compiled during the rounds; it should be none."""
    losses: list[float] = field(default_factory=list)
    """The global batch's loss at each step."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """Turns, by round."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """What its processes have answered to other questions."""
    error: str | None = None
    """Why the case ended early."""
    cannot_run: str | None = None
    """Why there is nothing to measure of it on this machine."""

    @property
    def takes_part(self) -> bool:
        """Whether it is still asked for steps."""
        return self.error is None and self.cannot_run is None

    @property
    def first_step_secs(self) -> float:
        """The median of its first steps."""
        return median(self.first_steps or [0.0])

    @property
    def step_secs(self) -> float:
        """The median of its step times."""
        return median(block.step_secs for block in self.blocks.values())

    @property
    def cpu_secs(self) -> float:
        """The median of the CPU time of a step."""
        return median(block.cpu_secs for block in self.blocks.values())

    @property
    def programs(self) -> str:
        """How many programs were compiled, in words."""
        return f"{self.compiles}{f' + {self.late_compiles} late' if self.late_compiles else ''}"


Results = Mapping[str, Result]
"""By the case's name."""


def done(cases: Sequence[Any], results: Results) -> list[Any]:
    """Return the cases that did not fail."""
    return [case for case in cases if results[case.name].error is None]


def other_cores(results: Results) -> float | None:
    """Return how many cores were busy with other work, the median over all turns."""
    return median_cores(block.other_cores for result in results.values() for block in result.blocks.values())


def paired_steps(case: Result | None, reference: Result | None) -> tuple[list[float], list[float]]:
    """Return the step times of two cases in the rounds that both took; nothing of one that failed or did not run.

    What slows the machine down for a while slows both, so that ratios within a round spread less than the times.
    """
    if case is None or reference is None or not (case.takes_part and reference.takes_part):
        return [], []
    rounds = sorted(case.blocks.keys() & reference.blocks.keys())
    own, theirs = ([result.blocks[index].step_secs for index in rounds] for result in (case, reference))
    return own, theirs


def paired_ratios(case: Result | None, reference: Result | None) -> list[float]:
    """Return a case's step time over its reference's, for each round that has both."""
    return [own / theirs for own, theirs in zip(*paired_steps(case, reference), strict=True)]


def ratio_cells(ratios: Sequence[float], to: str | None = None) -> list[str]:
    """Return the cells `ratio`, `quartiles` and, for a named reference, `to`; empty where nothing is known."""
    if not ratios:
        return [""] * (2 if to is None else 3)
    low, middle, high = spread(ratios)
    return [f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", *([] if to is None else [to])]


def compare_steps(
    what: str,
    rival: str,
    ours: Result | None,
    theirs: Result | None,
    *,
    reason: str | None = None,
    same_runtime: bool = True,
    unit: str = "s",
) -> Iterator[Comparison]:
    """Yield how the step times of two cases compare, in `s` or `ms`; nothing where one was not measured."""
    times = paired_steps(ours, theirs)
    if times[0]:
        scaled = [[secs * {"s": 1, "ms": 1000}[unit] for secs in of_case] for of_case in times]
        yield compare(what, rival, *scaled, unit, reason=reason, same_runtime=same_runtime)


def judge(limit: Limit, results: Results) -> Check:
    """Return whether a step takes no larger part of the reference's than is expected."""
    pair = [results.get(name) for name in (limit.case, limit.reference)]
    failed = any(result is not None and result.error for result in pair)
    return limit.judge("step time", paired_ratios(*pair), failed=failed)


def differing_losses(results: Results, tolerance: float = LOSS_TOLERANCE) -> list[str]:
    """Return a line for each case with a step whose loss is not that of the others, measured against their median."""
    losses = {name: result.losses for name, result in results.items() if result.takes_part and result.losses}
    wrong: dict[str, str] = {}
    for step, of_step in enumerate(zip(*losses.values(), strict=True)):
        middle = median(of_step)
        for name, loss in zip(losses, of_step, strict=True):
            if not abs(loss / middle - 1) <= tolerance / 2:  # also where it is not a number
                line = f"{name}: loss {loss:.6f} at step {step + 1}, {abs(loss / middle - 1):.1e} from the others'"
                wrong.setdefault(name, f"{line} {middle:.6f}")
    return list(wrong.values())


def loss_checks(results: Results, wrong: Sequence[str], agreed: str) -> list[Check]:
    """Return what failed, and which losses are wrong or else that they are as agreed."""
    failed = [Check(f"{name} failed: {result.error}", "missed") for name, result in results.items() if result.error]
    return failed + ([Check(line, "missed") for line in wrong] or [Check(agreed, "held")])


def parity(results: Results, reference: str) -> Iterator[Series]:
    """Yield how far each case's losses are from those of a reference, step by step."""
    expected = results.get(reference, Result()).losses
    for name, result in results.items():
        if name != reference and result.takes_part and len(result.losses) == len(expected):
            yield Series(
                plot="Loss parity",
                label=name,
                x=[1.0 + step for step in range(len(expected))],
                y=[abs(own / other - 1) for own, other in zip(result.losses, expected, strict=True)],
                x_label="step",
                y_label=f"relative difference to {reference}",
            )
