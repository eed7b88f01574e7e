"""Measure the loss in chunks beside the loss of all logits, where the vocabulary is large: bytes, time and numbers.

    python benchmarks/vocabulary.py
    python benchmarks/vocabulary.py --rounds 3

A Llama with few layers and 131,072 tokens in its vocabulary, natively in one process: its logits are most of what it
holds. The bytes of its tensors depend on nothing else that the machine does; step times are taken in turns.

Exits with 1 if a case fails, or their losses differ by more than 1e-5 after any of the steps.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _markdown import count, megabytes
from _memory_cases import Workload
from _report import Results, differing_losses, judge, loss_checks, other_cores, paired_ratios, ratio_cells
from _results import Limit, Report, Table, emit
from _teams import exit_status, measure, read_command_line

if TYPE_CHECKING:
    from _training import Steps

LARGE = Workload(layers=2, width=256, heads=4, vocabulary=131_072, length=1024, batch=4, family="llama")
SMALL = Workload(layers=1, width=32, heads=2, vocabulary=32_768, length=128, batch=8, family="llama")
CHUNK_OF_SMALL = 128
"""Tokens of a chunk for `--quick`: of itself one would have all."""
TOLERANCE = 1e-5
HEADER = ["case", "step s", "ratio", "quartiles", "most MB", "of which temporary", "ratio of most"]


@dataclass(frozen=True)
class Case:
    """One way to compute the loss."""

    name: str
    is_chunked: bool


WITHOUT, CHUNKED = CASES = (Case("all logits", False), Case("loss in chunks", True))
MEMORY = Limit(CHUNKED.name, WITHOUT.name, 0.35)
TIME = Limit(CHUNKED.name, WITHOUT.name, 1.10)
SMALL_MEMORY = Limit(CHUNKED.name, WITHOUT.name, 0.60)


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, [case.name for case in CASES], rounds=4, steps=1)
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.serve(lambda: build(args.worker, args.total_steps, is_small=args.quick))
        return 0
    arguments = ["--quick"] if args.quick else []
    results = measure(__file__, args.cases, args, arguments=arguments, questions=lambda case: ("memory",))
    peaks = {name: result.answers[0] for name, result in results.items() if result.answers}
    wrong = differing_losses(results, TOLERANCE)
    emit(make_report(args.cases, results, peaks, wrong, args), args.json)
    return exit_status(results, wrong)


def build(case: Case, total_steps: int, *, is_small: bool) -> "Steps":
    """Shard a model, and return what trains it."""
    import torch
    from _models import make_llama
    from _training import train_sharded

    import torchacc

    size = SMALL if is_small else LARGE
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(size.vocabulary, (total_steps * size.batch, size.length), generator=generator)
    model = make_llama(size.layers, size.width, size.heads, size.vocabulary, size.length)
    config = torchacc.Config(backend="native")
    config.compute.chunked_loss = case.is_chunked and (CHUNK_OF_SMALL if is_small else True)
    return train_sharded(model, tokens, size.batch, config)


def make_report(
    cases: Sequence[Case], results: Results, peaks: Mapping[str, Mapping[str, int]], wrong: Sequence[str], args: Any
) -> Report:
    """Return all that was measured, and what is expected of it."""
    size = SMALL if args.quick else LARGE
    return Report(
        name="vocabulary",
        title="A large vocabulary",
        setting=f"Llama of {size}, a vocabulary of {size.vocabulary:,}, float32, AdamW, natively in one process; "
        f"{count(args.rounds, 'round')} of {count(args.steps_per_round, 'step')}.",
        other_cores=other_cores(results),
        tables=[
            Table(
                title="Step time, and the bytes of a process's tensors in a step",
                header=HEADER,
                rows=[row(case, results, peaks) for case in cases if case.name in peaks],
            )
        ],
        checks=[
            (SMALL_MEMORY if args.quick else MEMORY).judge("memory", part_of_memory(peaks)),
            *([] if args.quick else [judge(TIME, results)]),
            *loss_checks(results, wrong, f"the losses agree to {TOLERANCE:g}"),
        ],
    )


def part_of_memory(peaks: Mapping[str, Mapping[str, int]]) -> list[float]:
    """Return the chunked loss's most bytes over those with all logits; nothing where one was not measured."""
    if not {CHUNKED.name, WITHOUT.name} <= peaks.keys():
        return []
    return [peaks[CHUNKED.name]["peak"] / peaks[WITHOUT.name]["peak"]]


def row(case: Case, results: Results, peaks: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    found, ratios = peaks[case.name], paired_ratios(results[case.name], results.get(WITHOUT.name))
    part = part_of_memory(peaks) if case.is_chunked else []
    sizes = [megabytes(found["peak"]), megabytes(found["peak"] - found["rest"])]
    cells = ratio_cells(ratios if case.is_chunked else [])
    return [case.name, f"{results[case.name].step_secs:.4f}", *cells, *sizes, *(f"{each:.3f}" for each in part or [1])]


if __name__ == "__main__":
    sys.exit(main())
