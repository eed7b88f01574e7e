"""Hold what `torchacc plan --search` says of layouts to what they do: the memory that they take, and their order.

    python benchmarks/layout_search.py
    python benchmarks/layout_search.py --cases "fsdp 2, FULL_SHARD" "tp 2, FULL_SHARD"

First as many processes as there are devices measure together how fast each of them multiplies, steps an optimizer,
calls operations and sends; by these speeds the search estimates. Then a Llama trains in each layout, natively. A few
layouts take turns, as a machine's speed drifts, the first of all among them each time: what is compared is how long the
others take beside it. Where several processes share a core, who waits leaves it to the others: the search is told how
many there are.

Exits with 1 if a layout fails, or the losses of two differ by more than 1e-5 after any of the steps.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _machine import checkout_environment
from _markdown import count, megabytes
from _memory_cases import Workload
from _report import Result, Results, differing_losses, loss_checks, other_cores, paired_ratios
from _results import Check, Report, Table, emit
from _teams import Team, exit_status, measure, read_command_line, running

if TYPE_CHECKING:
    import argparse

    from _training import Steps

SIZE = Workload(layers=4, width=256, heads=8, vocabulary=4096, length=256, batch=8, family="llama")
TOLERANCE = 1e-5
MEMORY_TOLERANCE = 0.10
MEMORY_STEPS = 6
"""How early a gradient is sent, and its memory free, is not the same in each step."""
MOST_PROCESSES = 24
"""That are alive at once: each takes 0.7 GB, and a machine that is short of memory is slow."""
TENSORS_STEPPED = 4 + 3
"""That AdamW reads, and writes, of each parameter: itself, its gradient, which is only read, and two of its state."""
CLEAR_DIFFERENCE = 1.20
"""Times whose ratio is less are not compared."""
HEADER = ["layout", "planned MB", "held MB", "planned / held", "estimated s", "measured s"]


@dataclass(frozen=True)
class Case:
    """One layout, by the name that the search gives it."""

    name: str

    @property
    def processes(self) -> int:
        """Return how many devices it is on: the product of its sizes."""
        return prod(int(axis.split()[1]) for axis in self.name.split(",")[0].split(" x "))


CASES = tuple(
    Case(name)
    for name in (
        *(f"{axis} 2, FULL_SHARD" for axis in ("fsdp", "tp", "sp", "pp")),
        *(f"{axis} 2, FULL_SHARD, recompute" for axis in ("fsdp", "tp", "sp", "pp")),
        "dp 2, NO_SHARD",
        "fsdp 2, SHARD_GRAD_OP",
        *(f"{axis} 8, FULL_SHARD" for axis in ("fsdp", "tp", "sp")),
        "fsdp 8, FULL_SHARD, recompute",
        "fsdp 8, SHARD_GRAD_OP",
        "dp 8, NO_SHARD",
        "dp 2 x fsdp 4, HYBRID_SHARD",
        "fsdp 4 x tp 2, FULL_SHARD",
        "fsdp 4 x sp 2, FULL_SHARD",
        "fsdp 4 x pp 2, FULL_SHARD",
        "fsdp 2 x pp 4, FULL_SHARD",
        "fsdp 2 x tp 4, FULL_SHARD, recompute",
        "fsdp 2 x tp 2 x sp 2, FULL_SHARD",
        "fsdp 2 x tp 2 x pp 2, FULL_SHARD",
    )
)
QUICK = ("fsdp 2, FULL_SHARD",)


def main() -> int:
    """Search, run the layouts, and print the report."""
    args = read_command_line(__doc__, CASES, QUICK, rounds=6, steps=3, add=add_options)
    if args.worker:
        import _worker  # here, as the parent needs no torch

        facts: dict[str, Any] = {}
        made = (lambda: measure_speeds(facts)) if args.worker == "prepare" else (lambda: build(args))
        _worker.serve(made, lambda: facts)
        return 0
    results: dict[str, Result] = {}
    secs: dict[str, float] = {}
    plans: dict[str, Any] = {}
    wrong: list[str] = []
    for devices in sorted({case.processes for case in args.cases}):
        cases = [case for case in args.cases if case.processes == devices]
        with tempfile.TemporaryDirectory(prefix="layouts_") as folder:
            found = search(devices, Path(folder))
            plans |= {plan["layout"]: plan for plan in found["fitting"]}
            path = Path(folder) / "found.json"
            path.write_text(json.dumps(found))
            groups = run_layouts(cases, args, path)
        secs |= step_times(groups)
        wrong += wrong_losses(groups)
        results |= joined(groups)
    emit(make_report(args.cases, results, secs, plans, wrong, args), args.json)
    return exit_status(results, wrong)


def run_layouts(cases: Sequence[Case], args: Any, found: Path) -> list[dict[str, Result]]:
    """Train in a few layouts at a time, the first of all among them, and return what each group did."""
    first, *others = cases
    at_once = max(1, MOST_PROCESSES // first.processes - 1)
    groups = [[first, *others[start : start + at_once]] for start in range(0, len(others) or 1, at_once)]
    arguments, questions = ["--found", str(found)], ("memory",) * MEMORY_STEPS
    return [measure(__file__, group, args, arguments=arguments, questions=lambda _: questions) for group in groups]


def step_times(groups: Sequence[Results]) -> dict[str, float]:
    """Return the seconds of a step by layout: the first one's, times the ratio of the two in the same rounds.

    Args:
        groups: The results of layouts that took turns, the first of all in each group.
    """
    first = next(iter(groups[0]))
    blocks = [block.step_secs for group in groups for block in group[first].blocks.values()]
    ratios = {name: paired_ratios(result, group[first]) for group in groups for name, result in group.items()}
    return {name: median(blocks) * median(of_rounds) for name, of_rounds in ratios.items() if of_rounds}


def wrong_losses(groups: Sequence[Results]) -> list[str]:
    """Return a line for each layout whose losses differ from those of all others, whichever it took turns with."""
    compared = (joined(groups), *groups)  # in the groups are all runs of the first one
    return list(dict.fromkeys(line for each in compared for line in differing_losses(each, TOLERANCE)))


def joined(groups: Sequence[Results]) -> dict[str, Result]:
    """Return the results of all groups by layout; of the first one, which is in each, a run that failed if any has."""
    results: dict[str, Result] = {}
    for name, result in (each for group in groups for each in group.items()):
        if name not in results or result.error:
            results[name] = result
    return results


def add_options(parser: "argparse.ArgumentParser") -> None:
    """Add what the processes of a layout are told."""
    parser.add_argument("--found", type=Path, metavar="FILE", help="what the search has found, as JSON")


def search(devices: int, folder: Path) -> Any:
    """Return what `torchacc plan --search` finds for this machine, as its `--json` has it."""
    team = Team("speeds", [sys.executable, __file__, "--worker", "prepare"], folder, processes=devices)
    with running([team]):
        team.start()
        answers = team.ask(facts=True)
    slowest = [f"{min(answer[name] for answer in answers):g}" for name in ("flops", "memory", "sent", "sent")]
    latency, call = (f"{max(answer[name] for answer in answers):g}" for name in ("latency", "call"))
    sharing = max(1.0, devices / len(os.sched_getaffinity(0)))
    model = folder / "config.json"
    model.write_text(json.dumps(answers[0]["model"]))
    command = [
        *(sys.executable, "-m", "torchacc", "plan", "--search", "--json", "--model", str(model)),
        *("--devices", str(devices), "--global-batch", str(SIZE.batch), "--seq", str(SIZE.length)),
        *("--device", ",".join([*slowest, str(devices), latency, f"{sharing:g}", call]), "--memory", "16GiB"),
    ]
    done = subprocess.run(command, env=checkout_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def make_model(size: Workload = SIZE) -> Any:
    """Return the model, with the same values in every process."""
    from _models import make_llama

    return make_llama(size.layers, size.width, size.heads, size.vocabulary, size.length)


def measure_speeds(facts: dict[str, Any]) -> "Steps":
    """Measure how fast this process is while all others measure the same, and return no steps.

    Args:
        facts: Gets FLOP/s of products as the model has them, bytes/s of memory in a step of the optimizer and of what
            is sent, the seconds of an exchange of next to nothing and of an operation on as little, and the model's
            configuration.
    """
    import torch
    import torch.distributed as dist
    from _training import make_optimizer, share_cores

    dist.init_process_group("gloo")
    processes = dist.get_world_size()
    share_cores(processes)
    left, right = torch.rand(SIZE.length, SIZE.width), torch.rand(SIZE.width, 4 * SIZE.width)
    model = make_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(model)
    parts = torch.rand(2**20), torch.empty(processes * 2**20)
    facts["model"] = model.config.to_dict()
    facts["flops"] = 2 * left.shape[0] * right.numel() / _seconds(lambda: left @ right)
    facts["memory"] = TENSORS_STEPPED * sum(each.nbytes for each in model.parameters()) / _seconds(optimizer.step)
    gathered = parts[0].nbytes * (processes - 1)
    facts["sent"] = gathered / _seconds(lambda: dist.all_gather_into_tensor(parts[1], parts[0]))
    facts["latency"] = _seconds(lambda: dist.all_reduce(left[0, :1]), most=200)
    facts["call"] = _seconds_per_operation()
    dist.destroy_process_group()
    return iter(())


def _seconds_per_operation() -> float:
    """Return how long one operation of forward and backward takes, in a model so small that it is called, no more."""
    import torch

    from torchacc.memory_plan.trace import record

    model = make_model(replace(SIZE, width=4 * SIZE.heads, vocabulary=64, length=8))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    secs = _seconds(lambda: model(input_ids=tokens, labels=tokens).loss.backward())
    meta = tokens.to("meta")
    return secs / len(record(model.to("meta"), {"input_ids": meta, "labels": meta}, eager=True).operations)


def _seconds(call: Callable[[], object], *, most: int = 50) -> float:
    """Return how long a call takes, on an average of as many as the other processes make, too."""
    for _ in range(3):
        call()
    started = time.perf_counter()
    for _ in range(most):
        call()
    return (time.perf_counter() - started) / most


def build(args: Any) -> "Steps":
    """Lay a model out as the search says, and return what trains it."""
    import torch
    from _training import share_cores, train_sharded

    import torchacc

    found = json.loads(args.found.read_text())
    plan = next((plan for plan in found["fitting"] if plan["layout"] == args.worker.name), None)
    if plan is None:
        names = "; ".join(plan["layout"] for plan in found["fitting"])
        raise SystemExit(f"the search has no layout {args.worker.name!r}, and has {names}")
    share_cores(args.worker.processes)
    generator = torch.Generator().manual_seed(1)
    steps = args.total_steps + MEMORY_STEPS - 1
    tokens = torch.randint(SIZE.vocabulary, (steps * SIZE.batch, SIZE.length), generator=generator)
    return train_sharded(make_model(), tokens, plan["batch_size"], torchacc.Config.from_dict(plan["config"]))


def make_report(
    cases: Sequence[Case],
    results: Results,
    secs: Mapping[str, float],
    plans: Mapping[str, Any],
    wrong: Sequence[str],
    args: Any,
) -> Report:
    """Return all that was measured, and what is expected of it."""
    ran = [case for case in cases if case.name in secs]
    memory = {case.name: plans[case.name]["bytes"]["total"] / held_bytes(results[case.name]) for case in ran}
    return Report(
        name="layout_search",
        title="Layouts that a search finds",
        setting=f"Llama of {SIZE}, float32, AdamW, natively; {count(args.rounds, 'round')} of "
        f"{count(args.steps_per_round, 'step')} of each layout, a few of which take turns: beside the first one.",
        other_cores=other_cores(results),
        tables=[
            Table(
                title="Bytes of the process that has most, and the time of a step",
                header=HEADER,
                rows=[row(case, results[case.name], secs[case.name], plans[case.name]) for case in ran],
            )
        ],
        checks=[
            *([] if args.quick else [judge_memory(memory), *judge_order(ran, secs, plans)]),
            *loss_checks(results, wrong, f"the losses agree to {TOLERANCE:g}"),
        ],
    )


def held_bytes(result: Result) -> int:
    """Return the bytes of the process that has most at once."""
    return max(answer["peak"] for answer in result.answers)


def judge_memory(ratios: Mapping[str, float]) -> Check:
    """Return whether all layouts take the memory that is planned."""
    off = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > MEMORY_TOLERANCE}
    text = f"{len(ratios) - len(off)} of {len(ratios)} layouts take what is planned to {MEMORY_TOLERANCE:.0%}"
    named = ", ".join(f"{name} {ratio:.2f}" for name, ratio in off.items())
    return Check.of(text, not off, f"planned / held: {named}" if off else None)


def judge_order(ran: Sequence[Case], secs: Mapping[str, float], plans: Mapping[str, Any]) -> list[Check]:
    """Return whether layouts whose times differ clearly are in the order of their estimates, by number of devices."""
    checks = []
    for devices in sorted({case.processes for case in ran}):
        names = [case.name for case in ran if case.processes == devices]
        pairs = [sorted(pair, key=secs.__getitem__) for pair in combinations(names, 2)]
        clear = [(a, b) for a, b in pairs if secs[b] > CLEAR_DIFFERENCE * secs[a]]
        wrong = [(a, b) for a, b in clear if estimated(plans[a]) > estimated(plans[b])]
        right = f"{len(clear) - len(wrong)} of {len(clear)}"
        text = f"on {devices} processes the search has {right} pairs in their order whose times differ by more than "
        named = "; ".join(f"{a} is faster than {b}" for a, b in wrong)
        checks.append(Check.of(f"{text}{CLEAR_DIFFERENCE - 1:.0%}", not wrong, named or None))
    return checks


def estimated(plan: Mapping[str, Any]) -> float:
    """Return the seconds that a step is estimated to take."""
    return float(plan["seconds"]["total"])


def row(case: Case, result: Result, secs: float, plan: Mapping[str, Any]) -> list[str]:
    """Return one layout's cells under `HEADER`."""
    planned, held = plan["bytes"]["total"], held_bytes(result)
    cells = [case.name, megabytes(planned), megabytes(held), f"{planned / held:.3f}"]
    return [*cells, f"{estimated(plan):.3f}", f"{secs:.3f}"]


if __name__ == "__main__":
    sys.exit(main())
