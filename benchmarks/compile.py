"""Count what is compiled in the first steps, and time them, beside hand-written torch_xla.

    python benchmarks/compile.py
    python benchmarks/compile.py --rounds 3 --cases "torch_xla, 4 layers" "xla-spmd, 4 layers"

All cases train the GPT-2 of `step_time.py`, some with more layers, for a few steps. Each run is a process of its own,
as what has been compiled stays; the cases take turns. A step's time includes all that is compiled for it.

Exits with 1 if a case fails; what compiles too often or too long is reported, not an error.
"""

import json
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from _cases import WORKLOAD, Case
from _compile_cases import CASES, DEPTHS, EXPECTATIONS, KINDS, ONE_PROGRAM, QUICK, STEPS
from _machine import in_turns, median_cores, run_alone
from _markdown import count
from _results import Check, Comparison, Report, Series, Table, compare, emit
from _teams import progress, read_command_line

HEADER = ["case", *(f"programs in step {1 + index}" for index in range(STEPS)), "step 1 s", "step 2 s", "last step s"]

Runs = dict[str, list[dict[str, Any]]]
"""What was measured of each case, by round: `graphs` and `secs` of each step, and `other_cores`."""


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, QUICK, rounds=1)
    if args.worker:
        work(args.worker)
        return 0
    runs: Runs = {case.name: [] for case in args.cases}
    for case in progress(in_turns(args.cases, args.rounds), "runs"):
        runs[case.name].append(run_alone([__file__, "--worker", case.name], {"PJRT_DEVICE": "CPU"}))
    emit(make_report(runs, args.rounds), args.json)
    return 0


def work(case: Case) -> None:
    """Take a case's steps, and print what each has compiled and how long it took."""
    import _worker  # here, as the parent needs no torch
    from _training import make_tokens

    steps = _worker.BUILDERS[case.kind](case, make_tokens(STEPS))
    graphs, secs = [_worker.num_compiles()], []
    for _ in range(STEPS):
        started = time.perf_counter()
        _worker.wait_for(next(steps))
        secs.append(time.perf_counter() - started)
        graphs.append(_worker.num_compiles())
    new = [after - before for before, after in zip(graphs, graphs[1:], strict=False)]
    sys.stdout.write(json.dumps({"graphs": new, "secs": secs}) + "\n")


def make_report(runs: Runs, rounds: int) -> Report:
    """Return all that was measured, and whether it is what was expected."""
    return Report(
        name="compile",
        title="Compile",
        setting=f"{WORKLOAD}, some with more layers; the first {STEPS} steps, each run in a process of its own; "
        f"{count(rounds, 'round')}.",
        other_cores=median_cores(run.get("other_cores") for of_case in runs.values() for run in of_case),
        tables=[
            Table(
                title="Programs compiled in each of the first steps, and their seconds",
                header=HEADER,
                rows=[table_row(name, of_case) for name, of_case in runs.items()],
            )
        ],
        checks=list(judgements(runs)),
        comparisons=list(comparisons(runs)),
        series=list(curves(runs)),
        reading=list(readings(runs)),
    )


def table_row(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return one case's cells under `HEADER`: medians, and the programs of each step."""
    graphs = ["/".join(sorted({str(run["graphs"][index]) for run in runs})) for index in range(STEPS)]
    secs = [f"{median(run['secs'][index] for run in runs):.2f}" for index in (0, 1, -1)]
    return [name, *graphs, *secs]


def judgements(runs: Runs) -> Iterator[Check]:
    """Yield a check for each expectation of the cases that ran."""
    for name in ONE_PROGRAM:
        if name in runs:
            most = max(sum(run["graphs"]) for run in runs[name])
            yield Check.of(f"{name}, 1 program, compiled {most}", most <= 1)
    for limit in EXPECTATIONS:
        if {limit.case, limit.reference} <= runs.keys():
            pairs = zip(two_steps(runs, limit.case), two_steps(runs, limit.reference), strict=True)
            yield limit.judge("time of two steps", [own / other for own, other in pairs])


def comparisons(runs: Runs) -> Iterator[Comparison]:
    """Yield how the time to the end of the second step compares with hand-written torch_xla's, by depth."""
    for layers in DEPTHS:
        own, rival = f"xla-spmd, {layers} layers", f"torch_xla, {layers} layers"
        if {own, rival} <= runs.keys():
            secs = (two_steps(runs, own), two_steps(runs, rival))
            yield compare(f"first two steps of {own}", "hand-written torch_xla", *secs, "s")


def curves(runs: Runs) -> Iterator[Series]:
    """Yield the time to the end of the second step against the depth, for each kind of case."""
    for kind in KINDS:
        depths = [layers for layers in DEPTHS if f"{kind}, {layers} layers" in runs]
        yield Series(
            plot="Compile time against depth",
            label=kind,
            x=list(map(float, depths)),
            y=[median(two_steps(runs, f"{kind}, {layers} layers")) for layers in depths],
            x_label="layers",
            y_label="first two steps, s",
        )


def readings(runs: Runs) -> Iterator[str]:
    """Yield what the deepest cases say."""
    deepest = {kind: f"{kind}, {DEPTHS[-1]} layers" for kind in KINDS}
    if not set(deepest.values()) <= runs.keys():
        return
    by_hand, spmd, scan = (median(two_steps(runs, name)) for name in deepest.values())
    yield (
        f"With {DEPTHS[-1]} layers the first two steps take {by_hand:.1f} s by hand, {spmd:.1f} s in `xla-spmd` and "
        f"{scan:.1f} s with `scan_layers`."
    )
    last = [median(run["secs"][-1] for run in runs[deepest[kind]]) for kind in KINDS[1:]]
    yield (
        f"A later step takes {last[0]:.2f} s there, and {last[1]:.2f} s with `scan_layers`, which computes each layer "
        "a second time in backward."
    )


def two_steps(runs: Runs, name: str) -> list[float]:
    """Return the seconds until a case's second step is done, by round."""
    return [sum(run["secs"][:2]) for run in runs[name]]


if __name__ == "__main__":
    sys.exit(main())
