"""Train on documents of many lengths, padded to the longest, to a few buckets, or packed, and time whole epochs.

    python benchmarks/input_pipeline.py
    python benchmarks/input_pipeline.py --rounds 2 --cases "plain PyTorch, to the longest" "xla-spmd-2, 4 even buckets"

XLA compiles a program for each length that a batch has. Fewer lengths mean fewer programs and more padding, which is
computed like anything else; packing has one length and next to no padding. A rate counts the documents' own tokens.
The order of the documents is the same in each epoch, so that only the first epoch compiles; with a new order in each,
batches that are padded to the longest go on to have new lengths.

Each case is a process of its own that stays alive; they take turns, an epoch each. The loaders are timed alone, too.

Exits with 1 if a case fails, or ends with another loss than those that see the same batches.
"""

import sys
from collections.abc import Iterator, Sequence
from statistics import median

from _input_cases import CASES, GLOBAL_BATCH, LAYERS, LONGEST, QUICK, RIVAL, WIDTH, Case, documents
from _markdown import count
from _report import (
    LATE_TOLERANCE,
    Result,
    Results,
    compare_steps,
    differing_losses,
    done,
    loss_checks,
    other_cores,
    paired_ratios,
    ratio_cells,
)
from _results import Comparison, Report, Series, Table, compare, emit, spread
from _teams import exit_status, measure, read_command_line

HEADER = [
    "case",
    "padding",
    "programs",
    "first epoch s",
    "later epochs s",
    "tokens/s",
    "ratio",
    "quartiles",
    "data wait",
]
LOADER_HEADER = ["case", "batches/s", "ms per batch", "ratio", "quartiles"]
COMPILES = "it compiles {}, one for each length"
PADS = "{:.0%} of the positions are padding, and {:.0%} where batches are padded to the longest"
PUTS = (
    "it finds each device's part of the order and pads to a bucket, in the loop's own thread; XLA copies to its device"
)


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, QUICK, rounds=5)
    if args.worker:
        import _input_worker  # here, as the parent needs no torch

        _input_worker.run(args.worker)
        return 0
    results = measure(__file__, args.cases, args, questions=lambda case: ["facts"] * args.rounds)
    alike = {case.name: results[case.name] for case in args.cases if not case.packed}
    wrong = differing_losses(alike, LATE_TOLERANCE)
    emit(make_report(args.cases, results, wrong, args.rounds), args.json)
    return exit_status(results, wrong)


def make_report(cases: Sequence[Case], results: Results, wrong: Sequence[str], rounds: int) -> Report:
    """Return all that was measured, and what it says."""
    lengths = sorted(map(len, documents()))
    ran = done(cases, results)
    return Report(
        name="input_pipeline",
        title="Input pipeline",
        setting=f"GPT-2, {LAYERS} layers x {WIDTH}, float32, AdamW; {len(lengths)} documents of {lengths[0]} to "
        f"{lengths[-1]} tokens, half of them up to {median(lengths):.0f}, in batches of {GLOBAL_BATCH}; blocks of "
        f"{LONGEST} where they are packed; {count(rounds, 'round')} of one epoch.",
        other_cores=other_cores(results),
        tables=[
            Table(
                title="Epochs over the same documents; a ratio is that of the time of later epochs to plain PyTorch's",
                header=HEADER,
                rows=[table_row(case, results) for case in ran],
            ),
            Table(
                title="The loaders alone, without training; a ratio is that of the time of a batch to plain PyTorch's",
                header=LOADER_HEADER,
                rows=[loader_row(case, results) for case in ran],
                note="A packed batch is one of ready blocks: its loader pads nothing.",
            ),
        ],
        checks=loss_checks(results, wrong, "the losses of all cases that see the same batches agree"),
        comparisons=list(comparisons(ran, results)),
        series=list(curves(ran, results)),
        reading=list(readings(ran, results)),
    )


def num_tokens() -> int:
    """Return the tokens of an epoch, padding left out."""
    return sum(map(len, documents()))


def padding_of(name: str, results: Results) -> float:
    """Return the share of positions that hold no token."""
    return float(max(0.0, 1 - num_tokens() / results[name].answers[-1]["positions"]))


def table_row(case: Case, results: Results) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result = results[case.name]
    secs = result.step_secs
    wait = median(found["wait"] for found in result.answers)
    cells = [case.name, f"{padding_of(case.name, results):.0%}", result.programs, f"{result.first_step_secs:.1f}"]
    cells += [f"{secs:.2f}", f"{num_tokens() / secs:,.0f}"]
    return [*cells, *ratio_cells(paired_ratios(result, _rival_of(case, results))), f"{wait:.1%}"]


def loader_row(case: Case, results: Results) -> list[str]:
    """Return one case's cells under `LOADER_HEADER`."""
    own = _batch_secs(case.name, results)
    cells = [case.name, f"{1 / median(own):,.0f}", f"{1000 * median(own):.2f}"]
    if _rival_of(case, results) is None:
        return [*cells, "", ""]
    return [
        *cells,
        *ratio_cells([mine / theirs for mine, theirs in zip(own, _batch_secs(RIVAL, results), strict=True)]),
    ]


def comparisons(cases: Sequence[Case], results: Results) -> Iterator[Comparison]:
    """Yield how torchacc compares with plain PyTorch: in the first epoch, in later ones, and in its loader alone."""
    for case in cases:
        result, rival = results[case.name], _rival_of(case, results)
        if rival is None:
            continue
        is_native = case.kind == "native"
        firsts = ([result.first_step_secs], [rival.first_step_secs])
        compiles = result.compiles > 0
        reason = COMPILES.format(count(result.compiles, "program")) if compiles else None
        yield compare(
            f"first epoch of {case.name}", RIVAL, *firsts, "s", reason=reason, compiles=compiles, same_runtime=is_native
        )
        shares = [padding_of(name, results) for name in (case.name, RIVAL)]
        reason = PADS.format(*shares) if shares[0] > shares[1] else None
        what = f"later epochs of {case.name}"
        yield from compare_steps(what, RIVAL, result, rival, reason=reason, same_runtime=is_native)
        if not case.packed:
            loaders = [[1000 * secs for secs in _batch_secs(name, results)] for name in (case.name, RIVAL)]
            yield compare(f"loader of {case.name} alone", RIVAL, *loaders, "ms per batch", reason=PUTS)


def curves(cases: Sequence[Case], results: Results) -> Iterator[Series]:
    """Yield the time of the first epoch and of later ones, by case."""
    names = [case.name for case in cases]
    if not names:
        return
    later = [results[name].step_secs for name in names]
    first = [results[name].first_step_secs for name in names]
    for label, secs in (("first epoch, with compiling", first), ("later epochs", later)):
        yield Series(
            plot="Epochs over documents of many lengths",
            label=label,
            x=list(names),
            y=secs,
            x_label="how batches are made",
            y_label="seconds",
        )


def readings(cases: Sequence[Case], results: Results) -> Iterator[str]:
    """Yield what the numbers say."""
    longest = next((case for case in cases if case.kind == "xla-spmd" and case.batches == "to the longest"), None)
    for case in cases:
        own = results[case.name]
        if case.kind == "xla-spmd" and longest is not None and case is not longest:
            theirs = results[longest.name]
            yield (
                f"{case.name}: {count(own.compiles, 'program')} and {own.first_step_secs / theirs.first_step_secs:.2f} "
                f"of the first epoch of padding to the longest, which compiles {theirs.compiles}; "
                f"{padding_of(case.name, results):.0%} of the positions are padding, and a later epoch takes "
                f"{spread(paired_ratios(own, theirs)).middle:.2f} of the time."
            )
        elif case.kind == "native" and (rival := _rival_of(case, results)) is not None:
            ratio = spread(paired_ratios(own, rival)).middle
            yield f"{case.name}: a later epoch takes {ratio:.2f} of the time of {RIVAL}."


def _rival_of(case: Case, results: Results) -> Result | None:
    """Return what plain PyTorch has measured, where that ran and is not the case itself."""
    rival = None if case.name == RIVAL else results.get(RIVAL)
    return rival if rival is not None and rival.takes_part else None


def _batch_secs(name: str, results: Results) -> list[float]:
    return [found["loader_secs"] / found["batches"] for found in results[name].answers]


if __name__ == "__main__":
    sys.exit(main())
