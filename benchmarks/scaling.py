"""Train the same global batch on more and more devices of one machine, and read what each device costs.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --rounds 3 --cases native-1 native-2 fsdp2-2

The devices share the machine's cores, so that no step can get faster: what grows with their number is overhead. What
does get smaller is what one device holds. Under SPMD its bytes are those of XLA's own plan, natively those of the
tensors of a process in one step; neither depends on what else the machine does. Step times are taken in turns, as in
`step_time.py`.

Exits with 1 if a case fails or ends with another loss than the others.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from _cases import ALL_ROUND, GLOBAL_BATCH, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, WORKLOAD, Case
from _markdown import TRAFFIC_HEADER, count, megabytes, traffic_cells
from _memory_cases import Case as Plan
from _memory_cases import Workload
from _report import (
    Results,
    compare_steps,
    differing_losses,
    done,
    loss_checks,
    other_cores,
    paired_ratios,
    ratio_cells,
)
from _results import Comparison, Report, Series, Table, compare, emit, spread
from _teams import exit_status, measure, read_command_line

LABELS = {"xla-spmd": "xla-spmd", "native": "native", "fsdp2": "raw FSDP2"}
CASES = (
    *(Case(f"xla-spmd-{n}", "xla-spmd", devices=n, reference="xla-spmd-1") for n in (1, 2, 4, 8)),
    *(Case(f"native-{n}", "native", processes=n, reference="native-1") for n in (1, 2, 4)),
    *(Case(f"fsdp2-{n}", "fsdp2", processes=n, reference="native-1") for n in (2, 4)),
)
QUICK = ("native-1", "native-2")
SIZE = Workload(LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, GLOBAL_BATCH)
TIME_HEADER = ["case", "processes x devices", "step s", "CPU s per step", "ratio", "quartiles", "to"]
BYTES_HEADER = ["case", "parameters and state MB", "most MB", *TRAFFIC_HEADER]


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
    args = read_command_line(__doc__, CASES, QUICK, rounds=6, steps=3)
    if args.worker:
        import _worker  # here, as the parent needs no torch

        _worker.run(args.worker, args.total_steps)
        return 0
    found = planned([case for case in args.cases if case.kind == "xla-spmd"])
    results = measure(__file__, args.cases, args, questions=lambda case: () if case.kind == "xla-spmd" else ("memory",))
    for name, result in results.items():
        if result.answers:
            found[name] = max((Bytes(**answer) for answer in result.answers), key=lambda each: each.peak)
    wrong = differing_losses(results)
    emit(make_report(args.cases, results, found, wrong, args.rounds, args.steps_per_round), args.json)
    return exit_status(results, wrong)


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
    results: Results,
    found: Mapping[str, Bytes],
    wrong: Sequence[str],
    rounds: int,
    steps: int,
) -> Report:
    """Return all that was measured, and what it says."""
    ran = done(cases, results)
    return Report(
        name="scaling",
        title="Scaling",
        setting=f"{WORKLOAD}, FULL_SHARD, on virtual devices and processes that share this machine's cores; "
        f"{count(rounds, 'round')} of {count(steps, 'step')}.",
        other_cores=other_cores(results),
        tables=[
            Table(
                title="Step time at the same global batch",
                header=TIME_HEADER,
                rows=[time_row(case, results) for case in ran],
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
        comparisons=list(comparisons(ran, results, found)),
        series=[*curves(ran, results), *memory_curves(ran, found)],
        reading=list(readings(ran, results, found)),
    )


def time_row(case: Case, results: Results) -> list[str]:
    """Return one case's cells under `TIME_HEADER`."""
    result = results[case.name]
    cells = [case.name, f"{case.processes} x {case.devices}", f"{result.step_secs:.4f}", f"{result.cpu_secs:.3f}"]
    return [*cells, *ratio_cells(_ratios(case, results), case.reference or "")]


def bytes_row(name: str, found: Bytes) -> list[str]:
    """Return one case's cells under `BYTES_HEADER`."""
    return [name, megabytes(found.rest), megabytes(found.peak), *traffic_cells(found.traffic)]


def comparisons(cases: Sequence[Case], results: Results, found: Mapping[str, Bytes]) -> Iterator[Comparison]:
    """Yield how torchacc compares with raw FSDP2 on as many devices: in time, and natively in bytes."""
    rivals = {case.total_devices: case.name for case in cases if case.kind == "fsdp2"}
    for case in cases:
        rival = rivals.get(case.total_devices)
        if rival is None or case.kind == "fsdp2":
            continue
        who = f"raw FSDP2 on {case.total_devices} processes"
        is_native = case.kind == "native"
        yield from compare_steps(
            f"step time of {case.name}",
            who,
            results[case.name],
            results[rival],
            reason=ALL_ROUND if is_native else None,
            same_runtime=is_native,
        )
        if is_native:
            peaks = [[found[name].peak / 1e6] for name in (case.name, rival)]
            yield compare(f"most bytes of a process of {case.name}", who, *peaks, "MB")


def curves(cases: Sequence[Case], results: Results) -> Iterator[Series]:
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


def readings(cases: Sequence[Case], results: Results, found: Mapping[str, Bytes]) -> Iterator[str]:
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


def _ratios(case: Case, results: Results) -> list[float]:
    """Return a case's step time over its reference's, by round; none for the reference itself."""
    reference = None if case.name == case.reference else results.get(case.reference or "")
    return paired_ratios(results[case.name], reference)


if __name__ == "__main__":
    sys.exit(main())
