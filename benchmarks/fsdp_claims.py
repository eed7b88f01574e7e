"""Measure what is said of FSDP: what prefetching gains and costs, and what recompute and offload save and cost.

    python benchmarks/fsdp_claims.py
    python benchmarks/fsdp_claims.py --rounds 3

The claims are about GPUs, and this measures natively on CPUs: the bytes of a process's tensors, which depend on nothing
else that the machine does, and step times in turns, as in `step_time.py`. A CPU has no copies that run beside the
computing, and no second memory to move to: `python -m benchmarks --profile gpu` measures those where there is a GPU.

Exits with 1 if a case fails or ends with another loss than the others of its model.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from _claims_cases import CASES, CLAIMS, GPU_COMMAND, PAIRS, QUICK, Case, Pair
from _machine import median_cores
from _markdown import count
from _memory_cases import Workload
from _report import Result, differing_losses, loss_checks, paired_ratios
from _results import Report, Series, Table, emit, spread
from _teams import SETTLING_STEPS, Team, noting_failure, parse_turns, running, take_turns, warm_up

if TYPE_CHECKING:
    from _training import Steps

HEADER = ["case", "step s", "ratio", "quartiles", "most MB", "of which temporary", "part", "to"]
CLAIMS_HEADER = ["claim", "what is said", "found here"]


@dataclass(frozen=True)
class Measured:
    """What a case costs, beside the case that it is compared with."""

    secs: float
    """Its step time as a ratio, the median over rounds."""
    most: float
    """The most bytes of a process as a ratio."""


def main() -> int:
    """Run the cases and print the report."""
    args = parse_turns(__doc__, [case.name for case in CASES], QUICK)
    total_steps = 2 + SETTLING_STEPS + args.rounds * args.steps_per_round
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.serve(lambda: build(next(case for case in CASES if case.name == args.worker), total_steps))
        return 0
    cases = [case for case in CASES if case.name in args.cases]
    results = {case.name: Result() for case in cases}
    peaks: dict[str, dict[str, int]] = {}
    sizes = ["--rounds", str(args.rounds), "--steps-per-round", str(args.steps_per_round)]
    with tempfile.TemporaryDirectory(prefix="fsdp_claims_") as logs:
        teams = [
            Team(
                case.name,
                [sys.executable, __file__, "--worker", case.name, *sizes],
                Path(logs),
                processes=case.processes,
            )
            for case in cases
        ]
        with running(teams):
            warm_up(teams, results)
            take_turns(teams, results, args.rounds, args.steps_per_round)
            for team in teams:
                if results[team.name].error is None:
                    with noting_failure(team, results[team.name]):
                        peaks[team.name] = max(team.ask(memory=True), key=lambda found: found["peak"])
    wrong = [line for size in {case.size for case in cases} for line in differing_losses(_of(size, results))]
    emit(make_report(cases, results, peaks, wrong, args.rounds, args.steps_per_round), args.json)
    return 1 if wrong or any(result.error for result in results.values()) else 0


def build(case: Case, total_steps: int) -> "Steps":
    """Shard a case's model, and return what trains it."""
    import torch
    from _models import make_gpt2
    from _training import train_sharded

    import torchacc

    size = case.size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(size.vocabulary, (total_steps * size.batch, size.length), generator=generator)
    model = make_gpt2(size.layers, size.width, size.heads, size.vocabulary, size.length)
    return train_sharded(model, tokens, size.batch // case.processes, torchacc.Config.from_dict(case.config))


def make_report(
    cases: Sequence[Case],
    results: Mapping[str, Result],
    peaks: Mapping[str, Mapping[str, int]],
    wrong: Sequence[str],
    rounds: int,
    steps: int,
) -> Report:
    """Return all that was measured, and what it says of the claims."""
    done = [case for case in cases if case.name in peaks]
    pairs = {pair: found for pair in PAIRS if (found := measured(pair, results, peaks)) is not None}
    sizes = dict.fromkeys(case.size for case in cases)
    return Report(
        name="fsdp_claims",
        title="What is said of FSDP",
        setting=f"GPT-2 of {' and of '.join(str(size) for size in sizes)}, float32, AdamW, native engine on this "
        f"machine's cores; {count(rounds, 'round')} of {count(steps, 'step')}.",
        other_cores=median_cores(block.other_cores for result in results.values() for block in result.blocks.values()),
        tables=[
            Table(
                title="Claims", header=CLAIMS_HEADER, rows=[[*claim[:2], found_of(claim[2], pairs)] for claim in CLAIMS]
            ),
            Table(
                title="Step time, and the bytes of a process's tensors in a step",
                header=HEADER,
                rows=[table_row(case, results, peaks) for case in done],
                note="All that is alive at once counts: parameters, gradients, state, activations, gathered weights.",
            ),
        ],
        checks=loss_checks(results, wrong, "the losses of a model's cases agree"),
        series=[
            Series(
                plot="Time and memory of FSDP's options, natively",
                label=label,
                x=[pair.name for pair in pairs],
                y=[getattr(found, name) for found in pairs.values()],
                x_label="option",
                y_label="ratio to the same without it",
            )
            for label, name in (("step time", "secs"), ("most memory", "most"))
            if pairs
        ],
        reading=[read_out(pair, found) for pair, found in pairs.items()],
    )


def measured(pair: Pair, results: Mapping[str, Result], peaks: Mapping[str, Mapping[str, int]]) -> Measured | None:
    """Return how a case compares with another; None where one of the two was not run or failed."""
    if not {pair.case, pair.reference} <= peaks.keys():
        return None
    secs = spread(paired_ratios(results[pair.case], results[pair.reference])).middle
    return Measured(secs, peaks[pair.case]["peak"] / peaks[pair.reference]["peak"])


def found_of(name: str | None, pairs: Mapping[Pair, Measured]) -> str:
    """Return what was found of a claim: the pair of that name, or else what stands there."""
    found = {pair.name: measured for pair, measured in pairs.items()}.get(name or "")
    if found is not None:
        return f"{100 * (found.secs - 1):+.0f} % step time, {100 * (found.most - 1):+.1f} % memory"
    if name in {pair.name for pair in PAIRS}:
        return "not run"
    return name or f"not measurable on a CPU: `{GPU_COMMAND}`"


def table_row(case: Case, results: Mapping[str, Result], peaks: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result, bytes_ = results[case.name], peaks[case.name]
    cells = [case.name, f"{median(block.step_secs for block in result.blocks.values()):.4f}"]
    sizes = [f"{bytes_['peak'] / 1e6:.1f}", f"{(bytes_['peak'] - bytes_['rest']) / 1e6:.1f}"]
    pair = next((pair for pair in PAIRS if pair.case == case.name and pair.reference in peaks), None)
    if pair is None:
        return [*cells, "", "", *sizes, "", ""]
    low, middle, high = spread(paired_ratios(result, results[pair.reference]))
    part = f"{bytes_['peak'] / peaks[pair.reference]['peak']:.3f}"
    return [*cells, f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", *sizes, part, pair.reference]


def read_out(pair: Pair, found: Measured) -> str:
    """Return a sentence on what an option does here."""
    time = f"{abs(100 * (found.secs - 1)):.0f} % {'less' if found.secs < 1 else 'more'} time for a step"
    memory = f"{abs(100 * (found.most - 1)):.1f} % {'less' if found.most < 1 else 'more'} memory"
    return f"{pair.name} takes {time} and {memory}, natively on this CPU."


def _of(size: Workload, results: Mapping[str, Result]) -> dict[str, Result]:
    return {case.name: results[case.name] for case in CASES if case.size == size and case.name in results}


if __name__ == "__main__":
    sys.exit(main())
