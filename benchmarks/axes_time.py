"""Time a step with tp, pp and sp beside the same split by hand with PyTorch's own tools.

    python benchmarks/axes_time.py
    python benchmarks/axes_time.py --starts 5 --cases pp-2-1f1b Schedule1F1B-2

All train a Llama natively in two processes, with the same batches and the same optimizer, in turns: with tp beside
`parallelize_module()`, where by hand the embedding stays whole, which torchacc splits; with pp beside the schedules
of `torch.distributed.pipelining`, of as many microbatches; and with sp beside DeepSpeed-Ulysses' algorithm, with
parameters sharded by FSDP2 over the same processes, as torchacc shards them. (PyTorch's `context_parallel()` has no
kernel for CPUs.)

Processes are started anew several times, and a ratio is the median over the rounds of all: where processes have their
memory makes a case up to 3% faster or slower for as long as they live.

Exits with 1 if a case fails, or the losses of an axis differ by more than 1e-5 after any of the steps.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from _markdown import count
from _memory_cases import Workload
from _report import (
    Result,
    Results,
    compare_steps,
    differing_losses,
    judge,
    loss_checks,
    other_cores,
    paired_ratios,
    ratio_cells,
)
from _results import Limit, Report, Table, emit
from _teams import exit_status, measure, read_command_line

if TYPE_CHECKING:
    from _training import Steps

SHORT = Workload(layers=4, width=256, heads=4, vocabulary=4096, length=128, batch=8, family="llama")
LONG = replace(SHORT, length=1024, batch=1)
SIZES = {"tp": SHORT, "pp": SHORT, "sp": LONG}
"""By the axis."""
MICROBATCHES = 4
STARTS, MOST_STARTS = 3, 100
TOLERANCE = 1e-5
MOST = 1.05
"""How much longer than by hand a step may take."""
HEADER = ["case", "step s", "ratio", "quartiles"]


@dataclass(frozen=True)
class Case:
    """One way to split a model over two processes."""

    name: str
    axis: str
    schedule: str = ""
    """Of the stages."""
    by_hand: str = ""
    """What the model is split with by hand."""
    ring_size: int | None = None
    processes: int = 2


ULYSSES = Case("ulysses-2", "sp", by_hand="DeepSpeed-Ulysses' algorithm")
PAIRS = (
    (Case("tp-2", "tp"), Case("parallelize_module-2", "tp", by_hand="parallelize_module()")),
    (Case("pp-2-gpipe", "pp", "gpipe"), Case("ScheduleGPipe-2", "pp", by_hand="ScheduleGPipe")),
    (Case("pp-2-1f1b", "pp", "1f1b"), Case("Schedule1F1B-2", "pp", by_hand="Schedule1F1B")),
    (
        Case("pp-2-zero-bubble", "pp", "zero_bubble"),
        Case("ScheduleInterleavedZeroBubble-2", "pp", by_hand="ScheduleInterleavedZeroBubble"),
    ),
    (Case("sp-2", "sp"), ULYSSES),
    (Case("sp-2-ring", "sp", ring_size=2), ULYSSES),
)
"""Ours, and that by hand."""
CASES = tuple(dict.fromkeys(case for pair in PAIRS for case in pair))


def main() -> int:
    """Run the cases and print the report."""
    names = [case.name for case in CASES]
    args = read_command_line(__doc__, CASES, names, rounds=6, steps=3, add=add_options)
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.serve(lambda: build(args.worker, args.total_steps))
        return 0
    args.starts = 1 if args.quick else args.starts
    results: dict[str, Result] = {}
    wrong: list[str] = []
    for axis in SIZES:  # one after the other, so that their processes are not alive together
        cases = [case for case in args.cases if case.axis == axis]
        for start in range(args.starts):
            found = measure(__file__, cases, args)
            wrong += differing_losses(found, TOLERANCE)
            for name, result in found.items():
                before = results.setdefault(name, Result())
                before.error = before.error or result.error
                before.blocks |= {start * args.rounds + turn: block for turn, block in result.blocks.items()}
    emit(make_report(args.cases, results, wrong, args), args.json)
    return exit_status(results, wrong)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option of this benchmark's own."""
    help_text = f"how often the processes of each case are started (default: {STARTS}); --rounds is of each start"
    parser.add_argument(
        "--starts", type=int, choices=range(1, MOST_STARTS + 1), default=STARTS, metavar="N", help=help_text
    )


def build(case: Case, total_steps: int) -> "Steps":
    """Split a model, and return what trains it."""
    import torch
    from _models import make_llama
    from _training import share_cores, train_sharded

    import torchacc

    share_cores(case.processes)
    size, generator = SIZES[case.axis], torch.Generator().manual_seed(1)
    tokens = torch.randint(size.vocabulary, (total_steps * size.batch, size.length), generator=generator)
    model = make_llama(size.layers, size.width, size.heads, size.vocabulary, size.length)
    if case.by_hand:
        return build_by_hand(case, model, tokens)
    config = torchacc.Config(backend="native")
    config.dist.fsdp.size = 1
    getattr(config.dist, case.axis).size = case.processes
    config.dist.sp.ring_size = case.ring_size
    if case.schedule:
        config.dist.pp.num_microbatches, config.dist.pp.schedule = MICROBATCHES, case.schedule  # type: ignore[assignment]
    return train_sharded(model, tokens, size.batch, config)


def build_by_hand(case: Case, model: Any, tokens: Any) -> "Steps":
    """Split a model without torchacc, and return what trains it."""
    import _axes_by_hand
    import torch

    torch.distributed.init_process_group("gloo")
    batch = SIZES[case.axis].batch
    if case.axis == "pp":
        return _axes_by_hand.split_stages(model, tokens, batch, case.by_hand, MICROBATCHES)
    split = {"tp": _axes_by_hand.split_layers, "sp": _axes_by_hand.split_samples}[case.axis]
    return split(model, tokens, batch)


def make_report(cases: Sequence[Case], results: Results, wrong: Sequence[str], args: Any) -> Report:
    """Return all that was measured, and what is expected of it."""
    limits = [Limit(ours.name, by_hand.name, MOST) for ours, by_hand in PAIRS if ours in cases]
    return Report(
        name="axes_time",
        title="Time of a step with tp, pp and sp",
        setting=f"Llama of {SHORT}, with sp {LONG.batch} x {LONG.length}; float32, AdamW, natively in two processes, "
        f"with pp in {MICROBATCHES} microbatches; {count(args.starts, 'start')} of the processes, each with "
        f"{count(args.rounds, 'round')} of {count(args.steps_per_round, 'step')}.",
        other_cores=other_cores(results),
        tables=[Table(title="Step time", header=HEADER, rows=[row(case, results) for case in cases])],
        checks=[
            *([] if args.quick else [judge(limit, results) for limit in limits]),
            *loss_checks(results, wrong, f"the losses of each axis agree to {TOLERANCE:g}"),
        ],
        comparisons=[
            comparison
            for ours, by_hand in PAIRS
            for comparison in compare_steps(
                f"step time of {ours.name}",
                f"{by_hand.by_hand} by hand",
                results.get(ours.name),
                results.get(by_hand.name),
            )
        ],
    )


def row(case: Case, results: Results) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result = results[case.name]
    if not (result.takes_part and result.blocks):
        return [case.name, "failed", "", ""]
    reference = dict(PAIRS).get(case)
    ratios = paired_ratios(result, results.get(reference.name)) if reference else []
    return [case.name, f"{result.step_secs:.4f}", *ratio_cells(ratios)]


if __name__ == "__main__":
    sys.exit(main())
