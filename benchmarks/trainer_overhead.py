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
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from _markdown import count
from _report import (
    Results,
    compare_steps,
    differing_losses,
    done,
    loss_checks,
    other_cores,
    paired_ratios,
    paired_steps,
    ratio_cells,
)
from _results import Comparison, Report, Series, Table, emit
from _teams import exit_status, measure, read_command_line
from _trainer_cases import CASES, GLOBAL_BATCH, LENGTH, LOG_EVERY_STEPS, LOOPS, MODEL, QUICK, REASONS, Case, write_text

HEADER = ["case", "first step s", "compiles", "step ms", "CPU ms per step", "ratio", "quartiles", "more ms per step"]


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, QUICK, rounds=6, add=add_folder)
    args.steps_per_round = LOG_EVERY_STEPS
    total_steps = args.total_steps + args.rounds * LOG_EVERY_STEPS
    if args.worker:
        import _trainer_worker  # here, as the parent needs no torch

        _trainer_worker.run(args.worker, args.folder, total_steps)
        return 0
    with tempfile.TemporaryDirectory(prefix="trainer_overhead_") as name:
        write_text(Path(name), total_steps)
        results = measure(__file__, args.cases, args, arguments=["--folder", name], folder=Path(name))
    wrong = differing_losses(results)
    emit(make_report(args.cases, results, wrong, args.rounds), args.json)
    return exit_status(results, wrong)


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the option by which the processes find their text."""
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def make_report(cases: Sequence[Case], results: Results, wrong: Sequence[str], rounds: int) -> Report:
    """Return all that was measured, and what it says."""
    ran = done(cases, results)
    compared = [(case, found) for case in ran for found in compared_with_bare(case, results)]
    return Report(
        name="trainer_overhead",
        title="Trainers beside a loop by hand",
        setting=f"GPT-2, {MODEL['n_layer']} layers x {MODEL['n_embd']}, {MODEL['n_head']} heads, vocabulary "
        f"{MODEL['vocab_size']}, global batch {GLOBAL_BATCH} x {LENGTH}, float32, AdamW, FULL_SHARD, "
        f"clipped gradients, a log line every {LOG_EVERY_STEPS} steps; {count(rounds, 'round')} of "
        f"{LOG_EVERY_STEPS} steps.",
        other_cores=other_cores(results),
        tables=[
            Table(
                title="Step time of each loop, beside the one by hand on the same engine",
                header=HEADER,
                rows=[table_row(case, results) for case in ran],
            )
        ],
        checks=loss_checks(results, wrong, "the losses of all cases agree at every step"),
        comparisons=[found for _, found in compared],
        series=list(bars(compared)),
        reading=list(readings(compared)),
    )


def compared_with_bare(case: Case, results: Results) -> Iterator[Comparison]:
    """Yield how a trainer's step compares with that of the loop by hand; nothing for that loop, or where it failed."""
    if case.loop != "bare":
        pair = (results[case.name], results.get(case.reference))
        reason = REASONS["saving" if case.save_every_steps else case.loop]
        yield from compare_steps(f"step time of {case.name}", LOOPS["bare"], *pair, reason=reason, unit="ms")


def table_row(case: Case, results: Results) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result, bare = results[case.name], results.get(case.reference) if case.loop != "bare" else None
    cells = [case.name, f"{result.first_step_secs:.2f}", result.programs]
    cells += [f"{1000 * secs:.1f}" for secs in (result.step_secs, result.cpu_secs)]
    more = [own - theirs for own, theirs in zip(*paired_steps(result, bare), strict=True)]
    return [*cells, *ratio_cells(paired_ratios(result, bare)), f"{1000 * median(more):+.1f}" if more else ""]


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
