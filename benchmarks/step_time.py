"""Time a training step of each engine beside its rivals, in one run.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --rounds 3 --cases eager torch_xla xla-spmd-1

The rivals: plain PyTorch, `torch.compile`, DDP and raw FSDP2, hand-written torch_xla and its FSDP classes, Hugging Face
Accelerate and Lightning Fabric (`pip install -r benchmarks/requirements.txt`). All cases train the same GPT-2 on the
same batches, each in processes of its own that stay alive. They take turns, a block of steps each, while the others
sleep; together they take about 16 GB. A ratio is the median over rounds of the ratio within one round, so that what
slows the machine down for a while does not end up in it. Compiling happens before the first round.

Exits with 1 if a case fails or has another loss than the others at any step; a slow case is reported, not an error.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from _cases import CASES, EXPECTATIONS, NEEDS, QUICK, RIVALRIES, WORKLOAD, Case
from _machine import median_cores
from _markdown import count
from _report import HEADER, Result, compared, differing_losses, judge, loss_checks, parity, table_row
from _results import Comparison, Report, Series, Table, emit
from _teams import SETTLING_STEPS, Team, running, take_turns, warm_up

Results = Mapping[str, Result]
"""By the case's name."""


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    total_steps = 1 + SETTLING_STEPS + args.rounds * args.steps_per_round
    cases = [case for case in CASES if case.name in args.cases]
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.run(next(case for case in CASES if case.name == args.worker), args.total_steps)
        return 0
    results = {case.name: Result(cannot_run=missing_package(case)) for case in cases}
    with tempfile.TemporaryDirectory(prefix="step_time_") as logs:
        teams = [make_team(case, total_steps, Path(logs)) for case in cases if results[case.name].takes_part]
        with running(teams):
            warm_up(teams, results)
            take_turns(teams, results, args.rounds, args.steps_per_round)
    emit(make_report(cases, results, args.rounds, args.steps_per_round), args.json)
    return 1 if differing_losses(results) or any(result.error for result in results.values()) else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--rounds", type=int, default=10, help="turns of each case (default: 10)")
    parser.add_argument("--steps-per-round", type=int, default=5, help="steps in one turn (default: 5)")
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="three cases and two rounds, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--total-steps", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1 or args.steps_per_round < 1:
        parser.error("--rounds and --steps-per-round are at least 1")
    if args.quick:
        args.rounds, args.steps_per_round = 2, 1
    args.cases = args.cases or (QUICK if args.quick else names)
    return args


def missing_package(case: Case) -> str | None:
    """Return why a case cannot run where the package that it needs is not installed."""
    package = NEEDS.get(case.kind)
    return None if package is None or find_spec(package) else f"{package} is not installed"


def make_team(case: Case, total_steps: int, logs: Path) -> Team:
    """Return the processes of a case, not yet started."""
    command = [sys.executable, __file__, "--worker", case.name, "--total-steps", str(total_steps)]
    return Team(case.name, command, logs, processes=case.processes, environment=environment(case))


def environment(case: Case) -> dict[str, str]:
    """Return what the rivals take from the environment; torchacc takes it from its config."""
    if case.kind in ("torch_xla", "xla-fsdp", "fsdpv2"):
        return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(case.devices)}
    if case.kind.startswith("accelerate"):
        return {"USE_TORCH_XLA": "0"}  # with torch_xla at hand it would leave the CPU for it
    return {}


def make_report(cases: Sequence[Case], results: Results, rounds: int, steps: int) -> Report:
    """Return all that was measured, and whether it is what was expected."""
    blocks = [block for result in results.values() for block in result.blocks.values()]
    against = list(compared(RIVALRIES, results))
    return Report(
        name="step_time",
        title="Step time",
        setting=f"{WORKLOAD}; {count(rounds, 'round')} of {count(steps, 'step')}.",
        other_cores=median_cores(block.other_cores for block in blocks),
        tables=[
            Table(
                title="Medians over rounds; a ratio is taken within a round, compiling happens before the first",
                header=HEADER,
                rows=[table_row(case, results) for case in cases],
                note=" ".join(
                    f"`{name}` cannot run here: {result.cannot_run}."
                    for name, result in results.items()
                    if result.cannot_run is not None
                )
                or None,
            )
        ],
        checks=[
            *loss_checks(results, differing_losses(results), "the losses of all cases agree at every step"),
            *(judge(each, results) for each in EXPECTATIONS if each.case in results),
        ],
        comparisons=against,
        series=[*bars(against), *parity(results, "eager")],
        reading=list(readings(results, against)),
    )


def bars(against: Sequence[Comparison]) -> Iterator[Series]:
    """Yield the ratios to the rivals."""
    if against:
        yield Series(
            plot="Step time over the rival's",
            label="ratio",
            x=[f"{each.what.removeprefix('step time of ')} / {each.rival}" for each in against],
            y=[each.ratio for each in against],
            x_label="",
            y_label="ratio; below 1 torchacc is faster",
        )


def readings(results: Results, against: Sequence[Comparison]) -> Iterator[str]:
    """Yield what the numbers say."""
    if against:
        faster = [each for each in against if each.spread is not None and each.spread[1] < 1]
        lost = [each for each in against if each.loses]
        even = len(against) - len(faster) - len(lost)
        line = f"torchacc is faster in {len(faster)}, slower in {len(lost)}, and within the noise in {even}."
        yield f"Of {count(len(against), 'comparison')} {line}"
    apart = [max(line.y) for line in parity(results, "eager")]
    if apart:
        yield f"The losses of all cases are within {max(apart):.0e} of plain PyTorch's at every step."
    waits = sum(block.wait_secs for result in results.values() for block in result.blocks.values())
    if waits:
        idle = sum(block.idle_cpu_secs for result in results.values() for block in result.blocks.values())
        yield f"A case that waits for its turn takes {idle / waits:.4f} cores."


if __name__ == "__main__":
    sys.exit(main())
