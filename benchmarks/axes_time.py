"""Time a step with tp and pp beside the same layers split by hand with PyTorch's own tools.

    python benchmarks/axes_time.py
    python benchmarks/axes_time.py --rounds 12 --cases pp-2-1f1b Schedule1F1B-2

All train a Llama natively in two processes, with the same batches and the same optimizer, in turns: with tp beside
`parallelize_module()`, where by hand the embedding stays whole, which torchacc splits; and with pp beside the schedules
of `torch.distributed.pipelining`, of as many microbatches.

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
MICROBATCHES = 4
TOLERANCE = 1e-5
MOST = 1.05
"""How much longer than by hand a step may take."""
HEADER = ["case", "step s", "ratio", "quartiles"]


@dataclass(frozen=True)
class Case:
    """One way to split layers over two processes."""

    name: str
    schedule: str = ""
    """Of the stages; empty for layers that are split over tp."""
    by_hand: str = ""
    """What the layers are split with by hand."""
    processes: int = 2


PAIRS = (
    (Case("tp-2"), Case("parallelize_module-2", by_hand="parallelize_module()")),
    (Case("pp-2-gpipe", "gpipe"), Case("ScheduleGPipe-2", "gpipe", by_hand="ScheduleGPipe")),
    (Case("pp-2-1f1b", "1f1b"), Case("Schedule1F1B-2", "1f1b", by_hand="Schedule1F1B")),
)
"""Ours, and that by hand."""
CASES = tuple(case for pair in PAIRS for case in pair)


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
    if case.by_hand:
        torch.distributed.init_process_group("gloo")
        return stages_by_hand(model, tokens, case) if case.schedule else split_by_hand(model, tokens)
    config = torchacc.Config(backend="native")
    config.dist.fsdp.size = 1
    if case.schedule:
        config.dist.pp.size, config.dist.pp.num_microbatches = case.processes, MICROBATCHES
        config.dist.pp.schedule = case.schedule  # type: ignore[assignment]
    else:
        config.dist.tp.size = case.processes
    return train_sharded(model, tokens, SIZE.batch, config)


def split_by_hand(model: Any, tokens: Any) -> "Steps":
    """Split layers as PyTorch's tutorial of tensor parallelism does, and return what trains them."""
    import torch
    from _cases import LEARNING_RATE
    from _training import train
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), plan)
    split = [each for each in model.parameters() if isinstance(each, DTensor)]
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], lr=LEARNING_RATE)
    return train(model, optimizer, ({"input_ids": part, "labels": part} for part in tokens.split(SIZE.batch)))


def stages_by_hand(model: Any, tokens: Any, case: Case) -> "Steps":
    """Cut a model in two as PyTorch's tutorial of pipeline parallelism does, and return what trains its stages."""
    import torch
    from _training import make_optimizer
    from torch import nn
    from torch.distributed import pipelining

    rank, last, decoder = torch.distributed.get_rank(), case.processes - 1, model.model
    each = SIZE.layers // case.processes
    decoder.layers = decoder.layers[rank * each : (rank + 1) * each]
    if rank < last:
        decoder.norm, model.lm_head = nn.Identity(), nn.Identity()
    if rank > 0:
        decoder.embed_tokens = None

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = model(**{"inputs_embeds" if rank else "input_ids": given}).logits
            return logits

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    class Stage(pipelining.PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            return []  # a first exchange for NCCL, of an int64 into a float32, at which gloo ends the process

    part = Part()
    stage = Stage(part, rank, case.processes, torch.device("cpu"))
    schedule = getattr(pipelining, case.by_hand)(stage, MICROBATCHES, loss_of)
    optimizer = make_optimizer(part)
    for batch in tokens.split(SIZE.batch):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = {"target": batch, "losses": losses} if rank == last else {}
        schedule.step(*([] if rank else [batch]), **given)
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        torch.distributed.broadcast(loss, last)  # as each process has the loss of ours
        yield loss


def make_report(cases: Sequence[Case], results: Results, wrong: Sequence[str], args: Any) -> Report:
    """Return all that was measured, and what is expected of it."""
    limits = [Limit(ours.name, by_hand.name, MOST) for ours, by_hand in PAIRS if ours in cases]
    return Report(
        name="axes_time",
        title="Layers split over tp and pp",
        setting=f"Llama of {SIZE}, float32, AdamW, natively in two processes, with pp in {MICROBATCHES} microbatches; "
        f"{count(args.rounds, 'round')} of {count(args.steps_per_round, 'step')}.",
        other_cores=other_cores(results),
        tables=[Table(title="Step time", header=HEADER, rows=[row(case, results) for case in cases])],
        checks=[
            *([] if args.quick else [judge(limit, results) for limit in limits]),
            *loss_checks(results, wrong, f"the losses agree to {TOLERANCE:g}"),
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
