"""Count what is compiled in the first steps, and time them, beside hand-written torch_xla.

    python benchmarks/compile.py
    python benchmarks/compile.py --rounds 1 --cases "torch_xla, 4 layers" "xla-spmd, 4 layers"

All cases train the GPT-2 of `step_time.py`, some with more layers, for a few steps. Each run is a process of its own,
as what has been compiled stays; the cases take turns. A step's time includes all that is compiled for it.

Exits with 1 if a case fails; what compiles too often or too long is reported, not an error.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from _cases import Case
from _compile_cases import CASES, EXPECTATIONS, STEPS, Graphs, Sooner
from _machine import OtherWork, checkout_environment, describe_other_work, machine_facts
from _report import render_table, spread
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
HEADER = ("case", *(f"programs in step {1 + index}" for index in range(STEPS)), "step 1 s", "step 2 s", "last step s")

Runs = dict[str, list[dict[str, Any]]]
"""What was measured of each case, by round: `graphs` and `secs` of each step, and `other_cores`."""


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    if args.worker:
        work(next(case for case in CASES if case.name == args.worker))
        return 0
    cases = [case for case in CASES if case.name in args.cases]
    runs: Runs = {case.name: [] for case in cases}
    turns = [case for index in range(args.rounds) for case in (cases if index % 2 == 0 else reversed(cases))]
    for case in tqdm(turns, desc="runs", file=sys.stderr, dynamic_ncols=True):
        runs[case.name].append(launch(case))
    sys.stdout.write(make_report(runs, args.rounds))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine_facts(), "runs": runs}, indent=1) + "\n")
    return 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case (default: 3)")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help="; ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    return args


def launch(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own, and return what it measured."""
    environment = {"PJRT_DEVICE": "CPU"} | checkout_environment()
    other_work = OtherWork()
    command = [sys.executable, __file__, "--worker", case.name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    measured["other_cores"] = other_work.cores()
    return measured


def work(case: Case) -> None:
    """Take a case's steps, and print what each has compiled and how long it took."""
    import _worker  # here, as the parent needs no torch

    steps = _worker.BUILDERS[case.kind](case, _worker.make_tokens(STEPS))
    graphs, secs = [_worker.num_compiles()], []
    for _ in range(STEPS):
        started = time.perf_counter()
        next(steps).item()
        _worker.wait_for_devices()
        secs.append(time.perf_counter() - started)
        graphs.append(_worker.num_compiles())
    new = [after - before for before, after in zip(graphs, graphs[1:], strict=False)]
    sys.stdout.write(json.dumps({"graphs": new, "secs": secs}) + "\n")


def make_report(runs: Runs, rounds: int) -> str:
    """Return the table, and below it what was expected, and how far the timings can be trusted."""
    facts = machine_facts()
    measured = [run.get("other_cores") for of_case in runs.values() for run in of_case]
    others = [cores for cores in measured if cores is not None]
    lines = [
        f"The first {STEPS} steps; {rounds} rounds on {facts['cores']} cores; torch {facts['torch']}, "
        f"torch_xla {facts['torch_xla']}, transformers {facts['transformers']}",
        "",
        render_table(HEADER, [table_row(name, of_case) for name, of_case in runs.items()]),
        "",
        *(f"- {line}" for line in judgements(runs)),
        *([f"- {describe_other_work(others)}"] if others else []),
    ]
    return "\n".join(lines) + "\n"


def table_row(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return one case's cells under `HEADER`: medians, and the programs of each step."""
    graphs = ["/".join(sorted({str(run["graphs"][index]) for run in runs})) for index in range(STEPS)]
    secs = [f"{median(run['secs'][index] for run in runs):.2f}" for index in (0, 1, -1)]
    return [name, *graphs, *secs]


def judgements(runs: Runs) -> Iterator[str]:
    """Yield a line for each expectation of the cases that ran: what was measured, and whether it holds."""
    for expectation in EXPECTATIONS:
        if isinstance(expectation, Graphs) and expectation.case in runs:
            most = max(sum(run["graphs"]) for run in runs[expectation.case])
            verdict = "HELD" if most <= expectation.graphs else "MISSED"
            yield f"{expectation.case}, {expectation.graphs} program: {most}, {verdict}"
        if isinstance(expectation, Sooner) and {expectation.case, expectation.reference} <= runs.keys():
            pairs = zip(runs[expectation.case], runs[expectation.reference], strict=True)
            found = spread([sum(own["secs"][:2]) / sum(other["secs"][:2]) for own, other in pairs])
            verdict = "HELD" if found.middle <= expectation.part else "MISSED"
            yield (
                f"{expectation.case}, two steps in {expectation.part:.2f} of the time of {expectation.reference}: "
                f"{found}, {verdict}"
            )


if __name__ == "__main__":
    sys.exit(main())
