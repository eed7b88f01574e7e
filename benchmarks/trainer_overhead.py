"""Time a step of the trainers beside a loop by hand, with the same model, batches and engine.

    python benchmarks/trainer_overhead.py
    python benchmarks/trainer_overhead.py --rounds 3 --cases "bare on native-1" "staged on native-1"

Each loop is a process of its own that stays alive; they take turns, a block of steps each, as in `step_time.py`. All
clip their gradients and log every 10 steps, once in each turn; one logs each step and to TensorBoard, and one saves a
whole checkpoint in the background in each turn.

Exits with 1 if a case fails or ends with another loss than the others.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from _machine import median_cores
from _markdown import count
from _report import Result, differing_losses, loss_checks, paired_ratios
from _results import Comparison, Report, Series, Table, compare, emit, spread
from _teams import SETTLING_STEPS, Team, running, take_turns, warm_up
from _trainer_cases import CASES, GLOBAL_BATCH, LENGTH, LOG_EVERY_STEPS, LOOPS, MODEL, QUICK, REASONS, Case, write_text

HEADER = ["case", "first step s", "compiles", "step ms", "CPU ms per step", "ratio", "quartiles", "more ms per step"]


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    total_steps = 1 + SETTLING_STEPS + args.rounds * LOG_EVERY_STEPS
    if args.worker:
        import _trainer_worker  # here, as the parent needs no torch

        _trainer_worker.run(next(case for case in CASES if case.name == args.worker), args.folder, total_steps)
        return 0
    cases = [case for case in CASES if case.name in args.cases]
    results = {case.name: Result() for case in cases}
    with tempfile.TemporaryDirectory(prefix="trainer_overhead_") as name:
        folder = Path(name)
        write_text(folder, total_steps)
        arguments = ["--folder", name, "--rounds", str(args.rounds)]
        teams = [
            Team(case.name, [sys.executable, __file__, "--worker", case.name, *arguments], folder) for case in cases
        ]
        with running(teams):
            warm_up(teams, results)
            take_turns(teams, results, args.rounds, LOG_EVERY_STEPS)
    wrong = differing_losses(results)
    emit(make_report(cases, results, wrong, args.rounds), args.json)
    return 1 if wrong or any(result.error for result in results.values()) else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--rounds", type=int, help=f"turns of {LOG_EVERY_STEPS} steps of each case (default: 6)")
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help="; ".join(names))
    parser.add_argument("--quick", action="store_true", help="two cases and one turn, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 6)
    args.cases = args.cases or (QUICK if args.quick else names)
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    return args


def make_report(cases: Sequence[Case], results: Mapping[str, Result], wrong: Sequence[str], rounds: int) -> Report:
    """Return all that was measured, and what it says."""
    done = [case for case in cases if results[case.name].error is None]
    compared = [(case, found) for case in done if (found := compared_with_bare(case, results)) is not None]
    return Report(
        name="trainer_overhead",
        title="Trainers beside a loop by hand",
        setting=f"GPT-2, {MODEL['n_layer']} layers x {MODEL['n_embd']}, {MODEL['n_head']} heads, vocabulary "
        f"{MODEL['vocab_size']}, global batch {GLOBAL_BATCH} x {LENGTH}, float32, AdamW, FULL_SHARD, "
        f"clipped gradients, a log line every {LOG_EVERY_STEPS} steps; {count(rounds, 'round')} of "
        f"{LOG_EVERY_STEPS} steps.",
        other_cores=median_cores(block.other_cores for result in results.values() for block in result.blocks.values()),
        tables=[
            Table(
                title="Step time of each loop, beside the one by hand on the same engine",
                header=HEADER,
                rows=[table_row(case, results) for case in done],
            )
        ],
        checks=loss_checks(results, wrong, "the losses of all cases agree at every step"),
        comparisons=[found for _, found in compared],
        series=list(bars(compared)),
        reading=list(readings(compared)),
    )


def compared_with_bare(case: Case, results: Mapping[str, Result]) -> Comparison | None:
    """Return how a trainer's step compares with that of the loop by hand; None for that loop, or where it failed."""
    bare = results.get(case.reference)
    if case.loop == "bare" or bare is None or bare.error is not None:
        return None
    rounds = sorted(results[case.name].blocks.keys() & bare.blocks.keys())
    times = [[1000 * result.blocks[index].step_secs for index in rounds] for result in (results[case.name], bare)]
    reason = REASONS["saving" if case.save_every_steps else case.loop]
    return compare(f"step time of {case.name}", LOOPS["bare"], *times, "ms", reason=reason)


def table_row(case: Case, results: Mapping[str, Result]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result = results[case.name]
    blocks = result.blocks.values()
    step, cpu = median(block.step_secs for block in blocks), median(block.cpu_secs for block in blocks)
    late = f" + {result.late_compiles} late" if result.late_compiles else ""
    cells = [case.name, f"{result.first_step_secs:.2f}", f"{result.compiles}{late}", f"{1000 * step:.1f}"]
    cells.append(f"{1000 * cpu:.1f}")
    bare = results.get(case.reference)
    if case.loop == "bare" or bare is None or bare.error is not None:
        return [*cells, "", "", ""]
    low, middle, high = spread(paired_ratios(result, bare))
    more = median(
        result.blocks[at].step_secs - bare.blocks[at].step_secs for at in result.blocks.keys() & bare.blocks.keys()
    )
    return [*cells, f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", f"{1000 * more:+.1f}"]


def bars(compared: Sequence[tuple[Case, Comparison]]) -> Iterator[Series]:
    """Yield the step time of each trainer as a ratio to that of the loop by hand."""
    if compared:
        yield Series(
            plot="Step time of the trainers",
            label="ratio to a loop by hand on the same engine",
            x=[case.name for case, _ in compared],
            y=[found.ratio for _, found in compared],
            x_label="loop",
            y_label="step time, ratio to a loop by hand",
        )


def readings(compared: Sequence[tuple[Case, Comparison]]) -> Iterator[str]:
    """Yield what the numbers say."""
    for case, found in compared:
        more = 100 * (found.ratio - 1)
        yield (
            f"{case.name}: {LOOPS[case.loop]} takes {abs(more):.1f} % {'more' if more > 0 else 'less'} time for a step "
            f"than a loop by hand, which takes {found.theirs:.0f} ms."
        )


if __name__ == "__main__":
    sys.exit(main())
