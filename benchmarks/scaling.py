"""Train the same global batch on more and more devices of one machine, and read what each device costs.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rounds 3 --cases native-1 native-2 fsdp2-2

The devices share the machine's cores, so that no step can get faster: what grows with their number is overhead. What
does get smaller is what one device holds. Under SPMD its bytes are those of XLA's own plan, natively those of the
tensors of a process in one step; neither depends on what else the machine does. Step times are taken in turns, as in
`step_time.py`.

Exits with 1 if a case fails or ends with another loss than the others.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from _cases import ALL_ROUND, GLOBAL_BATCH, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, WORKLOAD, Case
from _machine import median_cores
from _markdown import count
from _memory_cases import Case as Plan
from _memory_cases import Workload
from _report import Result, differing_losses, loss_checks, paired_ratios
from _results import Comparison, Report, Series, Table, compare, emit, spread
from _teams import SETTLING_STEPS, Team, noting_failure, parse_turns, running, take_turns, warm_up

LABELS = {"xla-spmd": "xla-spmd", "native": "native", "fsdp2": "raw FSDP2"}
CASES = (
    *(Case(f"xla-spmd-{n}", "xla-spmd", devices=n, reference="xla-spmd-1") for n in (1, 2, 4, 8)),
    *(Case(f"native-{n}", "native", processes=n, reference="native-1") for n in (1, 2, 4)),
    *(Case(f"fsdp2-{n}", "fsdp2", processes=n, reference="native-1") for n in (2, 4)),
)
QUICK = ("native-1", "native-2")
SIZE = Workload(LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, GLOBAL_BATCH)
TIME_HEADER = ["case", "processes x devices", "step s", "CPU s per step", "ratio", "quartiles", "to"]
BYTES_HEADER = ["case", "parameters and state MB", "most MB", "gathers", "reductions", "other"]


@dataclass
class Bytes:
    """What one device needs for a step, and the results of its collectives."""

    rest: int
    """Parameters and optimizer state, which are there all the time."""
    peak: int
    """The most that is alive at once."""
    traffic: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`count` and `size` in bytes, by kind."""


def main() -> int:
    """Run the cases and print the report."""
    args = parse_turns(__doc__, [case.name for case in CASES], QUICK)
    total_steps = 2 + SETTLING_STEPS + args.rounds * args.steps_per_round
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.run(next(case for case in CASES if case.name == args.worker), total_steps)
        return 0
    cases = [case for case in CASES if case.name in args.cases]
    results = {case.name: Result() for case in cases}
    found = planned([case for case in cases if case.kind == "xla-spmd"])
    with tempfile.TemporaryDirectory(prefix="scaling_") as logs:
        teams = [make_team(case, args, Path(logs)) for case in cases]
        with running(teams):
            warm_up(teams, results)
            take_turns(teams, results, args.rounds, args.steps_per_round)
            for case, team in zip(cases, teams, strict=True):
                if case.kind != "xla-spmd" and results[case.name].error is None:
                    with noting_failure(team, results[case.name]):
                        found[case.name] = max((Bytes(**each) for each in team.ask(memory=True)), key=lambda b: b.peak)
    wrong = differing_losses(results)
    emit(make_report(cases, results, found, wrong, args.rounds, args.steps_per_round), args.json)
    return 1 if wrong or any(result.error for result in results.values()) else 0


def make_team(case: Case, args: argparse.Namespace, logs: Path) -> Team:
    """Return the processes of a case, not yet started."""
    sizes = ["--rounds", str(args.rounds), "--steps-per-round", str(args.steps_per_round)]
    return Team(case.name, [sys.executable, __file__, "--worker", case.name, *sizes], logs, processes=case.processes)


def planned(cases: Sequence[Case]) -> dict[str, Bytes]:
    """Return what XLA plans for one device, by the case's name."""
    import memory

    plans = {case.name: Plan("FULL_SHARD", case.devices, workload=SIZE) for case in cases}
    measured = memory.measure(list(plans.values())) if plans else {}
    return {name: _from_plan(measured[plan]) for name, plan in plans.items()}


def _from_plan(plan: Mapping[str, Any]) -> Bytes:
    return Bytes(plan["buffers"]["updated"], plan["buffers"]["total"], plan["traffic"])


def make_report(
    cases: Sequence[Case],
    results: Mapping[str, Result],
    found: Mapping[str, Bytes],
    wrong: Sequence[str],
    rounds: int,
    steps: int,
) -> Report:
    """Return all that was measured, and what it says."""
    done = [case for case in cases if results[case.name].error is None]
    return Report(
        name="scaling",
        title="Scaling",
        setting=f"{WORKLOAD}, FULL_SHARD, on virtual devices and processes that share this machine's cores; "
        f"{count(rounds, 'round')} of {count(steps, 'step')}.",
        other_cores=median_cores(block.other_cores for result in results.values() for block in result.blocks.values()),
        tables=[
            Table(
                title="Step time at the same global batch",
                header=TIME_HEADER,
                rows=[time_row(case, results) for case in done],
                note="The devices share the cores: a ratio is overhead, and says nothing about speed on real devices.",
            ),
            Table(
                title="Bytes of one device in a step, collectives as number / MB of their results",
                header=BYTES_HEADER,
                rows=[bytes_row(name, each) for name, each in found.items()],
                note="Under SPMD they are those of XLA's plan, otherwise those of a process's tensors.",
            ),
        ],
        checks=loss_checks(results, wrong, "the losses of all cases agree"),
        comparisons=list(comparisons(done, results, found)),
        series=[*curves(done, results), *memory_curves(done, found)],
        reading=list(readings(done, results, found)),
    )


def time_row(case: Case, results: Mapping[str, Result]) -> list[str]:
    """Return one case's cells under `TIME_HEADER`."""
    blocks = results[case.name].blocks.values()
    step, cpu = median(block.step_secs for block in blocks), median(block.cpu_secs for block in blocks)
    cells = [case.name, f"{case.processes} x {case.devices}", f"{step:.4f}", f"{cpu:.3f}"]
    ratios = _ratios(case, results)
    if not ratios:
        return [*cells, "", "", ""]
    low, middle, high = spread(ratios)
    return [*cells, f"{middle:.3f}", f"{low:.3f} .. {high:.3f}", str(case.reference)]


def bytes_row(name: str, found: Bytes) -> list[str]:
    """Return one case's cells under `BYTES_HEADER`."""

    def collectives(*kinds: str) -> str:
        passed = [found.traffic[kind] for kind in kinds if kind in found.traffic]
        return " + ".join(f"{each['count']} / {_mb(each['size'])}" for each in passed)

    return [
        name,
        _mb(found.rest),
        _mb(found.peak),
        collectives("all-gather"),
        collectives("all-reduce", "reduce-scatter"),
        collectives("all-to-all", "collective-permute"),
    ]


def comparisons(
    cases: Sequence[Case], results: Mapping[str, Result], found: Mapping[str, Bytes]
) -> Iterator[Comparison]:
    """Yield how torchacc compares with raw FSDP2 on as many devices: in time, and natively in bytes."""
    rivals = {case.total_devices: case.name for case in cases if case.kind == "fsdp2"}
    for case in cases:
        rival = rivals.get(case.total_devices)
        if rival is None or case.kind == "fsdp2":
            continue
        rounds = sorted(results[case.name].blocks.keys() & results[rival].blocks.keys())
        times = [[results[name].blocks[index].step_secs for index in rounds] for name in (case.name, rival)]
        who = f"raw FSDP2 on {case.total_devices} processes"
        reason = ALL_ROUND if case.kind == "native" else None
        yield compare(f"step time of {case.name}", who, *times, "s", reason=reason)
        if case.kind == "native":
            peaks = [[found[name].peak / 1e6] for name in (case.name, rival)]
            yield compare(f"most bytes of a process of {case.name}", who, *peaks, "MB")


def curves(cases: Sequence[Case], results: Mapping[str, Result]) -> Iterator[Series]:
    """Yield the step time against the number of devices, as a ratio to that of one."""
    for kind, label in LABELS.items():
        points = [(case.total_devices, _ratios(case, results)) for case in cases if case.kind == kind]
        known = [(1, 1.0)] if any(ratios for _, ratios in points) else []
        known += [(devices, spread(ratios).middle) for devices, ratios in points if ratios and devices > 1]
        if known:
            yield Series(
                plot="Step time against devices",
                label=label,
                x=[float(devices) for devices, _ in known],
                y=[ratio for _, ratio in known],
                x_label="devices that share the cores",
                y_label="step time, ratio to one device",
            )


def memory_curves(cases: Sequence[Case], found: Mapping[str, Bytes]) -> Iterator[Series]:
    """Yield the most bytes of one device against their number."""
    for kind, label in LABELS.items():
        points = [(case.total_devices, found[case.name].peak / 1e6) for case in cases if case.kind == kind]
        if points:
            yield Series(
                plot="Memory of one device against devices",
                label=label,
                x=[float(devices) for devices, _ in points],
                y=[size for _, size in points],
                x_label="devices",
                y_label="most MB of one device in a step",
            )


def readings(cases: Sequence[Case], results: Mapping[str, Result], found: Mapping[str, Bytes]) -> Iterator[str]:
    """Yield what the numbers say."""
    for kind in ("xla-spmd", "native"):
        of_kind = [case for case in cases if case.kind == kind]
        if len(of_kind) < 2 or of_kind[0].total_devices != 1:
            continue
        first, last = of_kind[0], of_kind[-1]
        ratio, part = spread(_ratios(last, results)).middle, found[last.name].peak / found[first.name].peak
        yield (
            f"`{kind}`: {last.total_devices} devices take {ratio:.2f} of the time of one for the same global batch, on "
            f"the same cores, and each needs {part:.0%} of its bytes."
        )


def _ratios(case: Case, results: Mapping[str, Result]) -> list[float]:
    """Return a case's step time over its reference's, by round; none for the reference itself."""
    reference = results.get(case.reference or "")
    if reference is None or case.name == case.reference or reference.error is not None:
        return []
    return paired_ratios(results[case.name], reference)


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


if __name__ == "__main__":
    sys.exit(main())
