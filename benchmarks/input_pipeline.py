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

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _input_cases import CASES, GLOBAL_BATCH, LAYERS, LONGEST, QUICK, RIVAL, WIDTH, Case, documents
from _machine import median_cores
from _markdown import count
from _report import LATE_TOLERANCE, Result, differing_losses, loss_checks, paired_ratios
from _results import Comparison, Report, Series, Table, compare, emit, spread
from _teams import Team, noting_failure, running, take_turns, warm_up

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

Facts = dict[str, list[dict[str, Any]]]
"""What a case has said of itself, by round."""


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    if args.worker:
        import _input_worker  # here, as the parent needs no torch

        _input_worker.run(next(case for case in CASES if case.name == args.worker))
        return 0
    cases = [case for case in CASES if case.name in args.cases]
    results = {case.name: Result() for case in cases}
    facts: Facts = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="input_pipeline_") as logs:
        teams = [Team(case.name, [sys.executable, __file__, "--worker", case.name], Path(logs)) for case in cases]
        with running(teams):
            warm_up(teams, results)
            take_turns(teams, results, args.rounds, 1)
            for _ in range(args.rounds):
                for team in teams:
                    if results[team.name].error is None:
                        with noting_failure(team, results[team.name]):
                            facts[team.name] += team.ask(facts=True)
    alike = {case.name: results[case.name] for case in cases if not case.packed}
    wrong = differing_losses(alike, LATE_TOLERANCE)
    emit(make_report(cases, results, facts, wrong, args.rounds), args.json)
    return 1 if wrong or any(result.error for result in results.values()) else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--rounds", type=int, help="epochs of each case beside the first three (default: 5)")
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help="; ".join(names))
    parser.add_argument("--quick", action="store_true", help="two cases and one epoch, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.cases = args.cases or (QUICK if args.quick else names)
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    return args


def make_report(
    cases: Sequence[Case], results: Mapping[str, Result], facts: Facts, wrong: Sequence[str], rounds: int
) -> Report:
    """Return all that was measured, and what it says."""
    lengths = sorted(map(len, documents()))
    done = [case for case in cases if results[case.name].error is None]
    return Report(
        name="input_pipeline",
        title="Input pipeline",
        setting=f"GPT-2, {LAYERS} layers x {WIDTH}, float32, AdamW; {len(lengths)} documents of {lengths[0]} to "
        f"{lengths[-1]} tokens, half of them up to {median(lengths):.0f}, in batches of {GLOBAL_BATCH}; blocks of "
        f"{LONGEST} where they are packed; {count(rounds, 'round')} of one epoch.",
        other_cores=median_cores(block.other_cores for result in results.values() for block in result.blocks.values()),
        tables=[
            Table(
                title="Epochs over the same documents; a ratio is that of the time of later epochs to plain PyTorch's",
                header=HEADER,
                rows=[table_row(case, results, facts) for case in done],
            ),
            Table(
                title="The loaders alone, without training; a ratio is that of the time of a batch to plain PyTorch's",
                header=LOADER_HEADER,
                rows=[loader_row(case, facts) for case in done],
                note="A packed batch is one of ready blocks: its loader pads nothing.",
            ),
        ],
        checks=loss_checks(results, wrong, "the losses of all cases that see the same batches agree"),
        comparisons=list(comparisons(done, results, facts)),
        series=list(curves(done, results)),
        reading=list(readings(done, results, facts)),
    )


def num_tokens() -> int:
    """Return the tokens of an epoch, padding left out."""
    return sum(map(len, documents()))


def padding_of(case: Case, facts: Facts) -> float:
    """Return the share of positions that hold no token."""
    return max(0.0, 1 - num_tokens() / facts[case.name][-1]["positions"])


def table_row(case: Case, results: Mapping[str, Result], facts: Facts) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result = results[case.name]
    secs = median(block.step_secs for block in result.blocks.values())
    wait = median(found["wait"] for found in facts[case.name])
    late = f" + {result.late_compiles} late" if result.late_compiles else ""
    cells = [case.name, f"{padding_of(case, facts):.0%}", f"{result.compiles}{late}", f"{result.first_step_secs:.1f}"]
    cells += [f"{secs:.2f}", f"{num_tokens() / secs:,.0f}"]
    if case.name == RIVAL or not _has(RIVAL, results):
        return [*cells, "", "", f"{wait:.1%}"]
    low, middle, high = spread(paired_ratios(result, results[RIVAL]))
    return [*cells, f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", f"{wait:.1%}"]


def loader_row(case: Case, facts: Facts) -> list[str]:
    """Return one case's cells under `LOADER_HEADER`."""
    secs = median(_batch_secs(case.name, facts))
    cells = [case.name, f"{1 / secs:,.0f}", f"{1000 * secs:.2f}"]
    if case.name == RIVAL or not facts.get(RIVAL):
        return [*cells, "", ""]
    pairs = zip(_batch_secs(case.name, facts), _batch_secs(RIVAL, facts), strict=True)
    low, middle, high = spread([own / theirs for own, theirs in pairs])
    return [*cells, f"{middle:.2f}", f"{low:.2f} .. {high:.2f}"]


def comparisons(cases: Sequence[Case], results: Mapping[str, Result], facts: Facts) -> Iterator[Comparison]:
    """Yield how torchacc compares with plain PyTorch: in the first epoch, in later ones, and in its loader alone."""
    if not _has(RIVAL, results):
        return
    rival = results[RIVAL]
    for case in cases:
        if case.name == RIVAL:
            continue
        result = results[case.name]
        firsts = ([result.first_step_secs], [rival.first_step_secs])
        compiles = result.compiles > 0
        reason = COMPILES.format(count(result.compiles, "program")) if compiles else None
        yield compare(f"first epoch of {case.name}", RIVAL, *firsts, "s", reason=reason, compiles=compiles)
        rounds = sorted(result.blocks.keys() & rival.blocks.keys())
        times = [[each.blocks[index].step_secs for index in rounds] for each in (result, rival)]
        shares = [padding_of(each, facts) for each in (case, next(each for each in cases if each.name == RIVAL))]
        reason = PADS.format(*shares) if shares[0] > shares[1] else None
        yield compare(f"later epochs of {case.name}", RIVAL, *times, "s", reason=reason)
        if not case.packed:
            loaders = [[1000 * secs for secs in _batch_secs(name, facts)] for name in (case.name, RIVAL)]
            yield compare(f"loader of {case.name} alone", RIVAL, *loaders, "ms per batch", reason=PUTS)


def curves(cases: Sequence[Case], results: Mapping[str, Result]) -> Iterator[Series]:
    """Yield the time of the first epoch and of later ones, by case."""
    names = [case.name for case in cases]
    if not names:
        return
    later = [median(block.step_secs for block in results[name].blocks.values()) for name in names]
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


def readings(cases: Sequence[Case], results: Mapping[str, Result], facts: Facts) -> Iterator[str]:
    """Yield what the numbers say."""
    longest = next((case for case in cases if case.kind == "xla-spmd" and case.batches == "to the longest"), None)
    for case in cases:
        own = results[case.name]
        if case.kind == "xla-spmd" and longest is not None and case is not longest:
            theirs = results[longest.name]
            yield (
                f"{case.name}: {count(own.compiles, 'program')} and {own.first_step_secs / theirs.first_step_secs:.2f} "
                f"of the first epoch of padding to the longest, which compiles {theirs.compiles}; "
                f"{padding_of(case, facts):.0%} of the positions are padding, and a later epoch takes "
                f"{spread(paired_ratios(own, theirs)).middle:.2f} of the time."
            )
        elif case.kind == "native" and _has(RIVAL, results):
            ratio = spread(paired_ratios(own, results[RIVAL])).middle
            yield f"{case.name}: a later epoch takes {ratio:.2f} of the time of {RIVAL}."


def _has(name: str, results: Mapping[str, Result]) -> bool:
    return name in results and results[name].error is None


def _batch_secs(name: str, facts: Facts) -> list[float]:
    return [found["loader_secs"] / found["batches"] for found in facts[name]]


if __name__ == "__main__":
    sys.exit(main())
