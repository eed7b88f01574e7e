"""Time a training step of each engine beside its rivals, in one run.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --rounds 3 --cases eager torch_xla xla-spmd-1

The rivals: plain PyTorch, `torch.compile`, DDP and raw FSDP2, hand-written torch_xla and its FSDP classes, Hugging Face
Accelerate and Lightning Fabric (`pip install -r benchmarks/requirements.txt`). All cases train the same GPT-2 on the
same batches, each in processes of its own that stay alive. They take turns, a block of steps each, while the others
sleep; together they take most of 24 GB. A ratio is the median over rounds of the ratio within one round, so that what
slows the machine down for a while does not end up in it. Compiling happens before the first round.

Exits with 1 if a case fails or has another loss than the others at any step; a slow case is reported, not an error.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from _cases import CASES, EXPECTATIONS, FIRST_STEPS, NEEDS, QUICK, RIVALRIES, WORKLOAD, Case
from _markdown import count
from _report import (
    Results,
    compare_steps,
    differing_losses,
    judge,
    loss_checks,
    other_cores,
    paired_ratios,
    parity,
    ratio_cells,
)
from _results import Comparison, Limit, Report, Series, Table, emit
from _teams import exit_status, measure, read_command_line

STARTS = 3
"""Of a case whose first step is compared."""
HEADER = [
    *("case", "processes x devices", "first step s", "compiles", "step s", "CPU s per step"),
    *("ratio", "quartiles", "to", "loss"),
]


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, QUICK, rounds=10, steps=5)
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.run(args.worker, args.total_steps)
        return 0
    results = measure(
        __file__, args.cases, args, environment=environment, starts=starts(args.rounds), cannot_run=missing_package
    )
    wrong = differing_losses(results)
    emit(make_report(args.cases, results, wrong, args.rounds, args.steps_per_round), args.json)
    return exit_status(results, wrong)


def starts(rounds: int) -> dict[str, int]:
    """Return how often the cases are started whose first steps are compared; a short run compares one of each."""
    return {name: min(STARTS, rounds) for limit in FIRST_STEPS for name in (limit.case, limit.reference)}


def missing_package(case: Case) -> str | None:
    """Return why a case cannot run where the package that it needs is not installed."""
    package = NEEDS.get(case.kind)
    return None if package is None or find_spec(package) else f"{package} is not installed"


def environment(case: Case) -> dict[str, str]:
    """Return what the rivals take from the environment; torchacc takes it from its config."""
    if case.kind in ("torch_xla", "xla-fsdp", "fsdpv2"):
        return {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(case.devices)}
    if case.kind.startswith("accelerate"):
        return {"USE_TORCH_XLA": "0"}  # with torch_xla at hand it would leave the CPU for it
    if "compile" in case.kind:
        return {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}  # so that each first step compiles
    return {}


def make_report(cases: Sequence[Case], results: Results, wrong: Sequence[str], rounds: int, steps: int) -> Report:
    """Return all that was measured, and whether it is what was expected."""
    against = list(comparisons(results))
    absent = [
        f"`{name}` cannot run here: {result.cannot_run}." for name, result in results.items() if result.cannot_run
    ]
    return Report(
        name="step_time",
        title="Step time",
        setting=f"{WORKLOAD}; {count(rounds, 'round')} of {count(steps, 'step')}.",
        other_cores=other_cores(results),
        tables=[
            Table(
                title="Medians over rounds; a ratio is taken within a round, compiling happens before the first",
                header=HEADER,
                rows=[table_row(case, results) for case in cases],
                note=" ".join(absent) or None,
            )
        ],
        checks=[
            *loss_checks(results, wrong, "the losses of all cases agree at every step"),
            *(judge(each, results) for each in EXPECTATIONS if each.case in results),
            *(each.judge("first step", first_ratios(each, results)) for each in FIRST_STEPS if each.case in results),
        ],
        comparisons=against,
        series=[*bars(against), *parity(results, "eager")],
        reading=list(readings(results, against)),
    )


def first_ratios(limit: Limit, results: Results) -> list[float]:
    """Return the first steps of a case over its reference's; nothing where one was not measured."""
    pair = [results[name].first_steps for name in (limit.case, limit.reference) if name in results]
    return [ours / theirs for ours, theirs in zip(*pair, strict=False)] if len(pair) == 2 else []


def table_row(case: Case, results: Results) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result = results[case.name]
    cells = [case.name, f"{case.processes} x {case.devices}"]
    if result.error is not None or not result.blocks:
        why = "cannot run" if result.cannot_run else "failed"
        return [*cells, why, *[""] * (len(HEADER) - len(cells) - 1)]
    cells += [f"{result.first_step_secs:.2f}", result.programs, f"{result.step_secs:.4f}", f"{result.cpu_secs:.3f}"]
    ratios = paired_ratios(result, results.get(case.reference or ""))
    return [*cells, *ratio_cells(ratios, case.reference or ""), f"{result.losses[-1]:.6f}"]


def comparisons(results: Results) -> Iterator[Comparison]:
    """Yield how the step times of torchacc's cases compare with their rivals'."""
    for pair in RIVALRIES:
        ours, theirs = results.get(pair.case), results.get(pair.rival)
        what = f"step time of {pair.case}"
        yield from compare_steps(what, pair.title, ours, theirs, reason=pair.reason, same_runtime=pair.same_runtime)


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
