"""Measure what sp, pp and ep leave in the memory of one process, beside one process that has everything.

    python benchmarks/axes_memory.py
    python benchmarks/axes_memory.py --cases sp-1 sp-4

Natively, by PyTorch's own count of allocations: bytes depend on nothing else that the machine does, and are those of
the process that has most. The pairs are a Llama on one long sample, whose tokens `sp` cuts; a deep Llama, whose layers
`pp` cuts; and a Mixtral, whose experts `ep` spreads.

Exits with 1 if a case fails, or a pair's losses differ by more than 1e-5 after any of the steps.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from _markdown import megabytes
from _memory_cases import Workload
from _report import Result, Results, differing_losses, loss_checks, other_cores
from _results import Check, Limit, Report, Table, emit
from _teams import exit_status, measure, read_command_line

if TYPE_CHECKING:
    from _training import Steps

Axis = Literal["sp", "pp", "ep"]

LARGE: dict[Axis, Workload] = {
    "sp": Workload(layers=2, width=64, heads=4, vocabulary=2048, length=16_384, batch=1, family="llama"),
    "pp": Workload(layers=12, width=256, heads=4, vocabulary=1024, length=64, batch=8, family="llama"),
    "ep": Workload(layers=2, width=128, heads=4, vocabulary=1024, length=64, batch=4, family="mixtral"),
}
SMALL: dict[Axis, Workload] = {
    "sp": Workload(layers=2, width=64, heads=4, vocabulary=2048, length=2048, batch=1, family="llama"),
    "pp": Workload(layers=4, width=64, heads=4, vocabulary=128, length=32, batch=4, family="llama"),
    "ep": Workload(layers=1, width=64, heads=4, vocabulary=128, length=32, batch=4, family="mixtral"),
}
EXPERTS = 8
TOLERANCE = 1e-5
HEADER = ["case", "activations MB", "ratio", "parameters and state MB", "ratio", "experts MB", "ratio"]
COLUMNS = ("activations", "held", "experts")
"""What has a ratio, in the order of the table."""


@dataclass(frozen=True)
class Case:
    """One axis on a number of processes."""

    axis: Axis
    processes: int

    @property
    def name(self) -> str:
        """Return its name, such as `sp-4`."""
        return f"{self.axis}-{self.processes}"


CASES = tuple(Case(axis, processes) for axis in LARGE for processes in (1, 4))
LIMITS = {
    "activations": Limit("sp-4", "sp-1", 0.30),
    "held": Limit("pp-4", "pp-1", 0.30),
    "experts": Limit("ep-4", "ep-1", 0.25),
}
WHAT = {"activations": "activations", "held": "parameters and state", "experts": "experts"}


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, [case.name for case in CASES], rounds=1, steps=1)
    if args.worker:
        import _worker  # here, as the parent needs no torch

        workload = (SMALL if args.quick else LARGE)[args.worker.axis]
        facts: dict[str, Callable[[], dict[str, int]]] = {}
        _worker.serve(lambda: build(args.worker, workload, args.total_steps, facts), lambda: facts["held"]())
        return 0
    results: dict[str, Result] = {}
    wrong: list[str] = []
    for axis in LARGE:  # one pair after the other, so that their processes are not alive together
        pair = [case for case in args.cases if case.axis == axis]
        arguments = ["--quick"] if args.quick else []
        found = measure(__file__, pair, args, arguments=arguments, questions=lambda case: ("memory", "facts"))
        wrong += differing_losses(found, TOLERANCE)
        results |= found
    emit(make_report(args.cases, results, wrong, is_small=args.quick), args.json)
    return exit_status(results, wrong)


def build(case: Case, size: Workload, total_steps: int, facts: dict[str, Any]) -> "Steps":
    """Spread a model over an axis, and return what trains it.

    Args:
        case: The axis, and its size.
        size: The model and its batches.
        total_steps: Steps for which there are samples.
        facts: Gets as `held` what counts the bytes that this process holds between steps.
    """
    import torch
    from _models import MAKERS
    from _training import make_optimizer, make_samples, share_cores, train
    from torch.utils.data import DataLoader

    import torchacc

    share_cores(case.processes)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(size.vocabulary, (total_steps * size.batch, size.length), generator=generator)
    make = MAKERS[size.family]
    model: Any = make(size.layers, size.width, size.heads, size.vocabulary, size.length)
    config = torchacc.Config(backend="native")
    config.dist.fsdp.size = 1
    getattr(config.dist, case.axis).size = case.processes
    rows = size.batch // case.processes if case.axis == "ep" else size.batch
    loader: Any = DataLoader(make_samples(tokens), rows)
    model, loader = torchacc.accelerate(model, loader, config)
    optimizer = make_optimizer(model)
    facts["held"] = lambda: count_held(model, optimizer)
    return train(model, optimizer, loader)


def count_held(model: Any, optimizer: Any) -> dict[str, int]:
    """Return the bytes that this process holds of parameters and optimizer state, `held`, and of experts alone."""
    held = {
        name: sum(_local_bytes(tensor) for tensor in (parameter, *optimizer.state.get(parameter, {}).values()))
        for name, parameter in model.named_parameters()
    }
    return {"held": sum(held.values()), "experts": sum(size for name, size in held.items() if ".experts." in name)}


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.nbytes) if local.dim() else 0  # a parameter's number of steps is not a part of it


def most_of(case: Case, results: Results) -> dict[str, int]:
    """Return the bytes of the process that has most of each kind; nothing where they were not measured."""
    answers = results[case.name].answers if case.name in results else []
    if len(answers) != 2 * case.processes:
        return {}
    steps, held = answers[: case.processes], answers[case.processes :]
    return {
        "activations": max(step["peak"] - step["rest"] for step in steps),
        **{name: max(each[name] for each in held) for name in ("held", "experts")},
    }


def make_report(cases: Sequence[Case], results: Results, wrong: Sequence[str], *, is_small: bool) -> Report:
    """Return all that was measured, and what is expected of it."""
    sizes = SMALL if is_small else LARGE
    found = {case.name: most_of(case, results) for case in cases}
    models = "; ".join(f"{axis}: {size.family.capitalize()} of {size}" for axis, size in sizes.items())
    note = "Activations are the most that a step has allocated at once beyond what it began with."
    rows = [row(case, found) for case in cases if found[case.name]]
    title = "Bytes of the process that has most, and their ratio to one process"
    return Report(
        name="axes_memory",
        title="Memory of a process with sp, pp and ep",
        setting=f"{models}, {EXPERTS} experts; float32, AdamW, natively; no recompute.",
        other_cores=other_cores(results),
        tables=[Table(title=title, header=HEADER, rows=rows, note=note)],
        checks=[
            *([] if is_small else judge_memory(found)),
            *loss_checks(results, wrong, f"the losses of each pair agree to {TOLERANCE:g}"),
        ],
    )


def judge_memory(found: Mapping[str, Mapping[str, int]]) -> list[Check]:
    """Return whether each axis leaves what is expected of it."""
    return [limit.judge(WHAT[what], ratio(what, limit, found)) for what, limit in LIMITS.items()]


def ratio(what: str, limit: Limit, found: Mapping[str, Mapping[str, int]]) -> list[float]:
    """Return the part that one case has of its reference's bytes; nothing where one was not measured."""
    ours, whole = found.get(limit.case), found.get(limit.reference)
    return [ours[what] / whole[what]] if ours and whole and whole[what] else []


def row(case: Case, found: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    cells = [case.name]
    for what in COLUMNS:
        part = ratio(what, Limit(case.name, f"{case.axis}-1", None), found)
        size = found[case.name][what]
        cells += [megabytes(size) if size else "", f"{part[0]:.3f}" if part else ""]
    return cells


if __name__ == "__main__":
    sys.exit(main())
