"""Time a training step of each engine beside plain PyTorch, hand-written torch_xla and raw FSDP2, in one run.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --rounds 3 --cases eager torch_xla xla-spmd-1

All cases train the same GPT-2 on the same batches, each in processes of its own that stay alive. They take turns, a
block of steps each, while the others sleep. A ratio is the median over rounds of the ratio within one round, so that
what slows the machine down for a while does not end up in it. Compiling happens before the first round.

Exits with 1 if a case fails or ends with another loss than the others; a slow case is reported, not an error.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _cases import CASES, EXPECTATIONS, GLOBAL_BATCH, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, Case
from _machine import PACKAGES, describe_other_work, machine_facts
from _markdown import render_table
from _report import HEADER, Result, differing_losses, judge, table_row
from _teams import SETTLING_STEPS, Team, running, take_turns, warm_up


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    total_steps = 1 + SETTLING_STEPS + args.rounds * args.steps_per_round
    cases = [case for case in CASES if case.name in args.cases]
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.run(next(case for case in CASES if case.name == args.worker), args.total_steps)
        return 0
    results = {case.name: Result() for case in cases}
    with tempfile.TemporaryDirectory(prefix="step_time_") as logs:
        teams = [make_team(case, total_steps, Path(logs)) for case in cases]
        with running(teams):
            warm_up(teams, results)
            take_turns(teams, results, args.rounds, args.steps_per_round)
    wrong = differing_losses(results)
    sys.stdout.write(make_report(cases, results, wrong, args))
    if args.json:
        args.json.write_text(json.dumps(raw(results, args), indent=1) + "\n")
    return 1 if wrong or any(result.error for result in results.values()) else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--rounds", type=int, default=20, help="turns of each case (default: 20)")
    parser.add_argument("--steps-per-round", type=int, default=5, help="steps in one turn (default: 5)")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all timings there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--total-steps", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1 or args.steps_per_round < 1:
        parser.error("--rounds and --steps-per-round are at least 1")
    return args


def make_team(case: Case, total_steps: int, logs: Path) -> Team:
    """Return the processes of a case, not yet started."""
    command = [sys.executable, __file__, "--worker", case.name, "--total-steps", str(total_steps)]
    environment = {"PJRT_DEVICE": "CPU"} if case.kind == "torch_xla" else {}
    return Team(case.name, command, logs, processes=case.processes, environment=environment)


def make_report(cases: Sequence[Case], results: dict[str, Result], wrong: list[str], args: argparse.Namespace) -> str:
    """Return the table, and below it what failed, the losses, the checks, and how far the timings can be trusted."""
    facts = machine_facts()
    lines = [
        f"GPT-2, {LAYERS} layers x {WIDTH}, {HEADS} heads, vocabulary {VOCABULARY}, global batch {GLOBAL_BATCH} x "
        f"{LENGTH}, float32, AdamW; {args.rounds} rounds of {args.steps_per_round} steps on {facts['cores']} cores; "
        + ", ".join(f"{name} {facts[name]}" for name in PACKAGES),
        "",
        render_table(HEADER, [table_row(case, results) for case in cases]),
        "",
        *(f"- FAILED {name}: {result.error}" for name, result in results.items() if result.error is not None),
        *([f"- WRONG LOSS {line}" for line in wrong] or ["- the losses agree"]),
        *(f"- {judge(expectation, results)}" for expectation in EXPECTATIONS if expectation.case in results),
        *(f"- {line}" for line in _trust(results)),
    ]
    return "\n".join(lines) + "\n"


def raw(results: dict[str, Result], args: argparse.Namespace) -> dict[str, Any]:
    """Return everything that was measured, for `--json`."""
    return {
        "machine": machine_facts(),
        "rounds": args.rounds,
        "steps_per_round": args.steps_per_round,
        "cases": {name: asdict(result) for name, result in results.items()},
    }


def _trust(results: dict[str, Result]) -> list[str]:
    """Say what else the machine did: other work, and cases that did not sleep while they waited."""
    blocks = [block for result in results.values() for block in result.blocks.values()]
    lines = []
    others = [block.other_cores for block in blocks if block.other_cores is not None]
    if others:
        lines.append(describe_other_work(others))
    waits = sum(block.wait_secs for block in blocks)
    if waits:
        lines.append(f"a waiting case took {sum(block.idle_cpu_secs for block in blocks) / waits:.4f} cores")
    return lines


if __name__ == "__main__":
    sys.exit(main())
