"""Turn the timings of `step_time.py` into a table and a list of checks. Pure functions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from _cases import Case, Expectation
from _results import spread

LOSS_TOLERANCE = 1e-4
"""Largest relative difference between the losses of two cases after the same number of steps."""


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
    loss: float | None = None
    """The global batch's loss at the last step."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """Turns, by round."""
    error: str | None = None
    """Why the case ended early."""


def paired_ratios(case: Result, reference: Result) -> list[float]:
    """Return a case's step time over its reference's, for each round that has both.

    What slows the machine down for a while slows both, so that the ratios spread less than the times.
    """
    rounds = sorted(case.blocks.keys() & reference.blocks.keys())
    return [case.blocks[index].step_secs / reference.blocks[index].step_secs for index in rounds]


HEADER = (
    *("case", "processes x devices", "first step s", "compiles", "step s", "CPU s per step"),
    *("ratio", "quartiles", "to", "loss"),
)


def table_row(case: Case, results: Mapping[str, Result]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result = results[case.name]
    cells = [case.name, f"{case.processes} x {case.devices}"]
    if result.error is not None or not result.blocks:
        return [*cells, "failed", *[""] * (len(HEADER) - len(cells) - 1)]
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
    return [*cells, f"{result.loss:.6f}"]


def judge(expectation: Expectation, results: Mapping[str, Result]) -> str:
    """Return one line: what is expected of a ratio, what was measured, and whether that holds."""
    limit = f"<= {expectation.limit:.2f}" if expectation.limit is not None else "no limit"
    line = f"{expectation.case} / {expectation.reference} {limit}"
    pair = [results.get(name) for name in (expectation.case, expectation.reference)]
    case, reference = pair
    if case is None or reference is None:
        return f"{line}: not run"
    ratios = paired_ratios(case, reference)
    if not ratios or case.error or reference.error:
        return f"{line}: not measured, a case failed"
    found = spread(ratios)
    if expectation.limit is None:
        return f"{line}: {found}, reported only"
    verdict = "HELD" if found.middle <= expectation.limit else "MISSED"
    unsure = found.low <= expectation.limit < found.high
    return f"{line}: {found}, {verdict}{', within the noise' if unsure else ''}"


def differing_losses(results: Mapping[str, Result]) -> list[str]:
    """Return a line for each case whose loss is not that of the others, measured against their median."""
    losses = {name: result.loss for name, result in results.items() if result.error is None and result.loss is not None}
    if not losses:
        return []
    middle = median(losses.values())
    return [
        f"{name}: loss {loss:.6f}, {abs(loss / middle - 1):.1e} from the others' {middle:.6f}"
        for name, loss in losses.items()
        if not abs(loss / middle - 1) <= LOSS_TOLERANCE / 2  # also where it is not a number
    ]
