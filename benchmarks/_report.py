"""Turn the timings of `step_time.py` into a table and a list of checks. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from _cases import Case, Expectation, Rivalry
from _results import Check, Comparison, Series, compare, spread

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
    first_step_secs: float = 0.0
    """The first step, with all that is compiled for it."""
    compiles: int = 0
    """Programs compiled up to the first round."""
    late_compiles: int = 0
    """Programs compiled during the rounds; it should be none."""
    losses: list[float] = field(default_factory=list)
    """The global batch's loss at each step."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """Turns, by round."""
    error: str | None = None
    """Why the case ended early."""
    cannot_run: str | None = None
    """Why there is nothing to measure of it on this machine."""

    @property
    def takes_part(self) -> bool:
        """Whether it is still asked for steps."""
        return self.error is None and self.cannot_run is None


def paired_ratios(case: Result, reference: Result) -> list[float]:
    """Return a case's step time over its reference's, for each round that has both.

    What slows the machine down for a while slows both, so that the ratios spread less than the times.
    """
    rounds = sorted(case.blocks.keys() & reference.blocks.keys())
    return [case.blocks[index].step_secs / reference.blocks[index].step_secs for index in rounds]


HEADER = [
    *("case", "processes x devices", "first step s", "compiles", "step s", "CPU s per step"),
    *("ratio", "quartiles", "to", "loss"),
]


def table_row(case: Case, results: Mapping[str, Result]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result = results[case.name]
    cells = [case.name, f"{case.processes} x {case.devices}"]
    if result.error is not None or not result.blocks:
        why = "cannot run" if result.cannot_run else "failed"
        return [*cells, why, *[""] * (len(HEADER) - len(cells) - 1)]
    late = f" + {result.late_compiles} late" if result.late_compiles else ""
    step = median(block.step_secs for block in result.blocks.values())
    cpu = median(block.cpu_secs for block in result.blocks.values())
    cells += [f"{result.first_step_secs:.2f}", f"{result.compiles}{late}", f"{step:.4f}", f"{cpu:.3f}"]
    reference = results.get(case.reference or "")
    ratios = paired_ratios(result, reference) if reference is not None else []
    if ratios:
        low, middle, high = spread(ratios)
        cells += [f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", str(case.reference)]
    else:
        cells += ["", "", ""]
    return [*cells, f"{result.losses[-1]:.6f}"]


def judge(expectation: Expectation, results: Mapping[str, Result]) -> Check:
    """Return what is expected of a ratio, what was measured, and whether that holds."""
    limit = f"<= {expectation.limit:.2f}" if expectation.limit is not None else "no limit"
    line = f"step time of {expectation.case} / {expectation.reference} {limit}"
    pair = [results.get(name, Result()) for name in (expectation.case, expectation.reference)]
    ratios = paired_ratios(*pair)
    if not ratios or not all(each.takes_part for each in pair):
        return Check(f"{line}, not measured", "missed" if any(each.error for each in pair) else "reported")
    found = spread(ratios)
    if expectation.limit is None:
        return Check(f"{line}, is {found}", "reported")
    unsure = ", within the noise" if found.low <= expectation.limit < found.high else ""
    return Check(f"{line}, is {found}{unsure}", "held" if found.middle <= expectation.limit else "missed")


def differing_losses(results: Mapping[str, Result], tolerance: float = LOSS_TOLERANCE) -> list[str]:
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


def loss_checks(results: Mapping[str, Result], wrong: Sequence[str], agreed: str) -> list[Check]:
    """Return what failed, and which losses are wrong or else that they are as agreed."""
    failed = [Check(f"{name} failed: {result.error}", "missed") for name, result in results.items() if result.error]
    return failed + ([Check(line, "missed") for line in wrong] or [Check(agreed, "held")])


def compared(pairs: Sequence[Rivalry], results: Mapping[str, Result]) -> Iterator[Comparison]:
    """Yield how the step times of the pairs compare that were measured in the same rounds."""
    for pair in pairs:
        ours, theirs = (results.get(name, Result()) for name in (pair.case, pair.rival))
        rounds = sorted(ours.blocks.keys() & theirs.blocks.keys())
        if rounds and ours.takes_part and theirs.takes_part:
            secs = [[result.blocks[index].step_secs for index in rounds] for result in (ours, theirs)]
            yield compare(f"step time of {pair.case}", pair.title, *secs, "s", reason=pair.reason)


def parity(results: Mapping[str, Result], reference: str) -> Iterator[Series]:
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
