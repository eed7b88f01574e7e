"""Measure what is said of FSDP: what prefetching gains and costs, and what recompute and offload save and cost.

    python benchmarks/fsdp_claims.py
    python benchmarks/fsdp_claims.py --rounds 3

The claims are about GPUs, and this measures natively on CPUs: the bytes of a process's tensors, which depend on nothing
else that the machine does, and step times in turns, as in `step_time.py`. A CPU has no copies that run beside the
computing, and no second memory to move to: `python -m benchmarks --profile gpu` measures those where there is a GPU.

Exits with 1 if a case fails or ends with another loss than the others of its model.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from _claims_cases import CASES, CLAIMS, GPU_COMMAND, PAIRS, QUICK, Case, Pair
from _markdown import count, megabytes
from _memory_cases import Workload
from _report import Result, Results, differing_losses, loss_checks, other_cores, paired_ratios, ratio_cells
from _results import Report, Series, Table, emit, spread
from _teams import exit_status, measure, read_command_line

if TYPE_CHECKING:
    from _training import Steps

HEADER = ["case", "step s", "ratio", "quartiles", "most MB", "of which temporary", "part", "to"]
CLAIMS_HEADER = ["claim", "what is said", "found here"]


@dataclass(frozen=True)
class Cost:
    """What a case costs, beside the case that it is compared with."""

    secs: float
    """Its step time as a ratio, the median over rounds."""
    most: float
    """The most bytes of a process as a ratio."""


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, QUICK, rounds=6, steps=3)
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.serve(lambda: build(args.worker, args.total_steps))
        return 0
    results = measure(__file__, args.cases, args, questions=lambda case: ("memory",))
    peaks = {
        name: max(result.answers, key=lambda found: int(found["peak"]))
        for name, result in results.items()
        if result.answers
    }
    wrong = [line for size in {case.size for case in args.cases} for line in differing_losses(_of(size, results))]
    emit(make_report(args.cases, results, peaks, wrong, args.rounds, args.steps_per_round), args.json)
    return exit_status(results, wrong)


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
    results: Results,
    peaks: Mapping[str, Mapping[str, int]],
    wrong: Sequence[str],
    rounds: int,
    steps: int,
) -> Report:
    """Return all that was measured, and what it says of the claims."""
    done = [case for case in cases if case.name in peaks]
    pairs = {pair: found for pair in PAIRS if (found := cost_of(pair, results, peaks)) is not None}
    sizes = dict.fromkeys(case.size for case in cases)
    return Report(
        name="fsdp_claims",
        title="What is said of FSDP",
        setting=f"GPT-2 of {' and of '.join(str(size) for size in sizes)}, float32, AdamW, native engine on this "
        f"machine's cores; {count(rounds, 'round')} of {count(steps, 'step')}.",
        other_cores=other_cores(results),
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


def cost_of(pair: Pair, results: Results, peaks: Mapping[str, Mapping[str, int]]) -> Cost | None:
    """Return how a case compares with another; None where one of the two was not run or failed."""
    if not {pair.case, pair.reference} <= peaks.keys():
        return None
    secs = spread(paired_ratios(results[pair.case], results[pair.reference])).middle
    return Cost(secs, peaks[pair.case]["peak"] / peaks[pair.reference]["peak"])


def found_of(name: str | None, pairs: Mapping[Pair, Cost]) -> str:
    """Return what was found of a claim: the pair of that name, or else what stands there."""
    found = {pair.name: cost for pair, cost in pairs.items()}.get(name or "")
    if found is not None:
        return f"{100 * (found.secs - 1):+.0f} % step time, {100 * (found.most - 1):+.1f} % memory"
    if name in {pair.name for pair in PAIRS}:
        return "not run"
    return name or f"not measurable on a CPU: `{GPU_COMMAND}`"


def table_row(case: Case, results: Results, peaks: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result, found = results[case.name], peaks[case.name]
    pair = next((pair for pair in PAIRS if pair.case == case.name and pair.reference in peaks), None)
    ratios = paired_ratios(result, results[pair.reference]) if pair else []
    part = [f"{found['peak'] / peaks[pair.reference]['peak']:.3f}", pair.reference] if pair else ["", ""]
    sizes = [megabytes(found["peak"]), megabytes(found["peak"] - found["rest"])]
    return [case.name, f"{result.step_secs:.4f}", *ratio_cells(ratios), *sizes, *part]


def read_out(pair: Pair, found: Cost) -> str:
    """Return a sentence on what an option does here."""
    time = f"{abs(100 * (found.secs - 1)):.0f} % {'less' if found.secs < 1 else 'more'} time for a step"
    memory = f"{abs(100 * (found.most - 1)):.1f} % {'less' if found.most < 1 else 'more'} memory"
    return f"{pair.name} takes {time} and {memory}, natively on this CPU."


def _of(size: Workload, results: Results) -> dict[str, Result]:
    return {case.name: results[case.name] for case in CASES if case.size == size and case.name in results}


if __name__ == "__main__":
    sys.exit(main())
