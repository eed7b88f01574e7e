"""Time a step with tp beside the same layers split by hand with PyTorch's `parallelize_module()`.

    python benchmarks/axes_time.py
    python benchmarks/axes_time.py --rounds 12

Both train a Llama natively in two processes, with the same batches and the same optimizer, in turns. By hand the
embedding stays whole, which torchacc splits.

Exits with 1 if a case fails, or their losses differ by more than 1e-5 after any of the steps.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from _markdown import count
from _memory_cases import Workload
from _report import (
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

SIZE = Workload(layers=4, width=256, heads=4, vocabulary=4096, length=128, batch=8, family="llama")
TOLERANCE = 1e-5
HEADER = ["case", "step s", "ratio", "quartiles"]


@dataclass(frozen=True)
class Case:
    """One way to split layers over two processes."""

    name: str
    processes: int = 2


OURS, BY_HAND = CASES = (Case("tp-2"), Case("parallelize_module-2"))
LIMIT = Limit(OURS.name, BY_HAND.name, 1.05)


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, [case.name for case in CASES], rounds=10, steps=3)
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.serve(lambda: build(args.worker, args.total_steps))
        return 0
    results = measure(__file__, args.cases, args)
    wrong = differing_losses(results, TOLERANCE)
    emit(make_report(args.cases, results, wrong, args), args.json)
    return exit_status(results, wrong)


def build(case: Case, total_steps: int) -> "Steps":
    """Split a model, and return what trains it."""
    import torch
    from _models import make_llama
    from _training import share_cores, train_sharded

    import torchacc

    share_cores(case.processes)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(SIZE.vocabulary, (total_steps * SIZE.batch, SIZE.length), generator=generator)
    model = make_llama(SIZE.layers, SIZE.width, SIZE.heads, SIZE.vocabulary, SIZE.length)
    if case == BY_HAND:
        return split_by_hand(model, tokens)
    config = torchacc.Config(backend="native")
    config.dist.tp.size, config.dist.fsdp.size = case.processes, 1
    return train_sharded(model, tokens, SIZE.batch, config)


def split_by_hand(model: Any, tokens: Any) -> "Steps":
    """Split layers as PyTorch's tutorial of tensor parallelism does, and return what trains them."""
    import torch
    from _cases import LEARNING_RATE
    from _training import train
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.distributed.init_process_group("gloo")
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (OURS.processes,)), plan)
    split = [each for each in model.parameters() if isinstance(each, DTensor)]
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], lr=LEARNING_RATE)
    return train(model, optimizer, ({"input_ids": part, "labels": part} for part in tokens.split(SIZE.batch)))


def make_report(cases: Sequence[Case], results: Results, wrong: Sequence[str], args: Any) -> Report:
    """Return all that was measured, and what is expected of it."""
    return Report(
        name="axes_time",
        title="Layers split over tp",
        setting=f"Llama of {SIZE}, float32, AdamW, natively in two processes; {count(args.rounds, 'round')} of "
        f"{count(args.steps_per_round, 'step')}.",
        other_cores=other_cores(results),
        tables=[Table(title="Step time", header=HEADER, rows=[row(case, results) for case in cases])],
        checks=[
            *([] if args.quick else [judge(LIMIT, results)]),
            *loss_checks(results, wrong, f"the losses agree to {TOLERANCE:g}"),
        ],
        comparisons=list(
            compare_steps(
                f"step time of {OURS.name}",
                "parallelize_module() by hand",
                results.get(OURS.name),
                results.get(BY_HAND.name),
            )
        ),
    )


def row(case: Case, results: Results) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result = results[case.name]
    if not (result.takes_part and result.blocks):
        return [case.name, "failed", "", ""]
    ratios = paired_ratios(result, results.get(BY_HAND.name)) if case == OURS else []
    return [case.name, f"{result.step_secs:.4f}", *ratio_cells(ratios)]


if __name__ == "__main__":
    sys.exit(main())
