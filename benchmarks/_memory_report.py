"""Turn what `memory.py` found into a report. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _machine import median_cores
from _markdown import TRAFFIC_HEADER, megabytes, traffic_cells
from _memory_cases import (
    AGAINST_FSDP_V2,
    EXPECTATIONS,
    LONG_PLANS,
    PLAN_TOLERANCE,
    PLANS,
    RECOMPUTE_TIME,
    SEARCH,
    TIMES_MORE_PARAMETERS,
    Case,
    Share,
    Workload,
)
from _report import LOSS_TOLERANCE, ratio_cells
from _results import Check, Comparison, Limit, Report, Series, Table, compare, spread

HEADER = ["case", "parameters and state MB", "temporary MB", "total MB", "part", *TRAFFIC_HEADER]
SEARCH_HEADER = ["case", "layers", "parameters", "total MB", "times data parallel's"]
PLANNER_HEADER = ["model", "case", "planned MB", "XLA's MB", "off by"]
TIME_HEADER = ["case", "s", "recomputed s", "ratio", "quartiles"]
WHAT = {"updated": "parameters and state", "total": "total", "traffic": "collectives"}

Plan = dict[str, Any]
Plans = dict[Case, Plan]
"""What was measured of each case."""


@dataclass(frozen=True)
class Compared:
    """What the memory plan says of a case, and what XLA planned, in bytes."""

    planned: int
    measured: int

    @property
    def off_by(self) -> float:
        """By how much the plan is more than XLA's, as a part of XLA's."""
        return self.planned / self.measured - 1


@dataclass(frozen=True)
class Measured:
    """What the parts found; a part that did not run found nothing."""

    plans: Plans
    searched: Plans
    compared: Mapping[Case, Compared]
    timings: Sequence[dict[str, Any]]


def make_report(found: Measured) -> Report:
    """Return all that was measured, and whether it is what was expected."""
    tables, checks = plan_tables(found.plans), plan_checks(found.plans)
    if found.searched:
        tables.append(search_table(found.searched))
        checks += search_checks(found.searched)
    if found.compared:
        tables.append(planner_table(found.compared))
        checks.append(planner_check(found.compared))
    if found.timings:
        tables.append(time_table(found.timings))
        checks += [
            Limit(f"{timing['case']}, recomputed", "that without", RECOMPUTE_TIME).judge(
                "step time", recompute_ratios(timing)
            )
            for timing in found.timings
        ]
    return Report(
        name="memory",
        title="Memory",
        setting="XLA's own plans of a training step under SPMD, whose program is that of one device; float32, AdamW. "
        "Bytes are exact, whatever else the machine does.",
        other_cores=median_cores(timing["other_cores"] for timing in found.timings),
        tables=tables,
        checks=checks,
        comparisons=list(comparisons(found.plans)),
        series=list(curves(found.plans)),
        reading=list(readings(found)),
    )


def differing_losses(plans: Plans) -> list[str]:
    """Return a line for each case whose loss is not that of the first one with the same model and batch."""
    first: dict[Workload, tuple[Case, float]] = {}
    wrong = []
    for case, plan in plans.items():
        reference, loss = first.setdefault(case.workload, (case, plan["loss"]))
        if not abs(plan["loss"] / loss - 1) <= LOSS_TOLERANCE:
            wrong.append(f"{case.name}: loss {plan['loss']:.6f}, and {reference.name} {loss:.6f}")
    return wrong


def plans_off(compared: Mapping[Case, Compared]) -> list[Case]:
    """Return the cases whose memory plan is too far from XLA's."""
    return [case for case, found in compared.items() if abs(found.off_by) > PLAN_TOLERANCE]


def bytes_of(plan: Plan, what: str) -> int:
    """Return a plan's `total` or `updated` bytes, or those of its collectives' results, `traffic`."""
    if what == "traffic":
        return sum(int(found["size"]) for found in plan["traffic"].values())
    return int(plan["buffers"][what])


def judge(expectation: Share, plans: Plans) -> Check:
    """Return what is expected of a plan, what was measured, and whether that holds."""
    case, reference = expectation.case, expectation.reference
    part = bytes_of(plans[case], expectation.what) / bytes_of(plans[reference], expectation.what)
    held = part == expectation.limit if expectation.exactly else part <= expectation.limit
    sign = "=" if expectation.exactly else "<="
    where = "" if case.workload == PLANS[0].workload else f" ({case.workload})"
    line = f"{WHAT[expectation.what]} of {case.name} {sign} {expectation.limit:g} of {reference.name}{where}"
    return Check.of(f"{line}, is {part:.4g}", held)


def plan_tables(plans: Plans) -> list[Table]:
    """Return a table for each workload."""
    tables = []
    for workload in dict.fromkeys(case.workload for case in plans):
        cases = [case for case in plans if case.workload == workload]
        title = f"GPT-2, {workload}; bytes of one device, collectives as number / MB"
        tables.append(Table(title=title, header=HEADER, rows=[plan_row(case, plans) for case in cases]))
    if tables:
        tables[0].note = "`part` is that of the first case on as many devices."
    return tables


def plan_row(case: Case, plans: Plans) -> list[str]:
    """Return one case's cells under `HEADER`; the part is that of the first case on as many devices."""
    buffers = plans[case]["buffers"]
    alike = [other for other in plans if (other.workload, other.devices) == (case.workload, case.devices)]
    return [
        case.name,
        *(megabytes(buffers[what]) for what in ("updated", "temp", "total")),
        f"{buffers['total'] / plans[alike[0]]['buffers']['total']:.3f}",
        *traffic_cells(plans[case]["traffic"]),
    ]


def plan_checks(plans: Plans) -> list[Check]:
    """Return the checks of losses, and of what was expected of the cases that ran."""
    if not plans:
        return []
    wrong = differing_losses(plans)
    losses = [Check(f"the same loss: {line}", "missed") for line in wrong] or [Check("the losses agree", "held")]
    return losses + [judge(each, plans) for each in EXPECTATIONS if {each.case, each.reference} <= plans.keys()]


def search_table(found: Plans) -> Table:
    """Return the table of the deepest models."""
    rows = [
        [
            case.name,
            str(case.workload.layers),
            f"{plan['num_parameters']:,}",
            megabytes(plan["buffers"]["total"]),
            f"{times_more(case, found):.2f}",
        ]
        for case, plan in found.items()
    ]
    title = f"The deepest GPT-2 of width {SEARCH.workload.width} in the memory that NO_SHARD takes for the first"
    return Table(title=title, header=SEARCH_HEADER, rows=rows)


def search_checks(found: Plans) -> list[Check]:
    """Return how the deepest models compare with what PyTorch's documentation says."""
    checks = []
    for case in found:
        if case.strategy == "FULL_SHARD":
            times = times_more(case, found)
            line = f"parameters of {case.name} >= {TIMES_MORE_PARAMETERS} x NO_SHARD's, are {times:.2f} x"
            reason = "activations are not sharded, and weights are whole while they are used"
            checks.append(Check.of(line, times >= TIMES_MORE_PARAMETERS, reason))
    return checks


def times_more(case: Case, found: Plans) -> float:
    """Return the parameters of a search's model over those of data parallelism in the same memory."""
    of_budget = next(plan for budget, plan in found.items() if budget.devices == case.devices)
    return float(found[case]["num_parameters"] / of_budget["num_parameters"])


def planner_table(compared: Mapping[Case, Compared]) -> Table:
    """Return the table of what is planned and what XLA plans."""
    rows = [
        [
            case.workload.family,
            case.name,
            megabytes(found.planned),
            megabytes(found.measured),
            f"{100 * found.off_by:+.1f} %",
        ]
        for case, found in compared.items()
    ]
    title = "What `torchacc plan` says of a GPT-2 of 124 and a Llama of 162 million parameters, beside XLA's plan"
    return Table(title=title, header=PLANNER_HEADER, rows=rows)


def planner_check(compared: Mapping[Case, Compared]) -> Check:
    """Return whether the memory plan agrees with XLA's."""
    most = max(abs(found.off_by) for found in compared.values())
    line = f"the memory plan is off by <= {PLAN_TOLERANCE:.0%} of XLA's, is by {most:.1%} at most"
    return Check.of(line, not plans_off(compared))


def time_table(timings: Sequence[dict[str, Any]]) -> Table:
    """Return the table of step times."""
    rows = []
    for timing in timings:
        times = [f"{spread(secs).middle:.3f}" for secs in timing["secs"]]
        rows.append([timing["case"], *times, *ratio_cells(recompute_ratios(timing))])
    rounds = len(timings[0]["secs"][0])
    title = f"Step time with and without recompute; GPT-2, {LONG_PLANS[0].workload}; {rounds} rounds"
    return Table(title=title, header=TIME_HEADER, rows=rows)


def recompute_ratios(timing: dict[str, Any]) -> list[float]:
    """Return the step time with recompute over that without, within the same round."""
    plain, recomputed = timing["secs"]
    return [own / other for own, other in zip(recomputed, plain, strict=True)]


def comparisons(plans: Plans) -> Iterator[Comparison]:
    """Yield how FULL_SHARD compares with torch_xla's own class."""
    reasons = {
        "total": "the weights of a block are gathered whole, where FSDPv2 lets XLA keep a part of them cut",
        "traffic": "FULL_SHARD moves weights, whose bytes do not grow with the batch; FSDPv2 lets XLA move activations "
        "in their place, which are few at so small a batch",
    }
    for ours, rival in (AGAINST_FSDP_V2[:2], AGAINST_FSDP_V2[3:5]):
        if {ours, rival} <= plans.keys():
            for what, reason in reasons.items():
                numbers = [[bytes_of(plans[case], what) / 1e6] for case in (ours, rival)]
                title = f"{WHAT[what]} of {ours.name} at {ours.workload.batch} x {ours.workload.length} tokens"
                yield compare(title, "torch_xla's FSDPv2 class", *numbers, "MB", reason=reason)


def curves(plans: Plans) -> Iterator[Series]:
    """Yield the total against the number of devices, for each strategy that shards over all of them."""
    for strategy in ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"):
        for recompute in (False, True):
            cases = [c for c in PLANS if (c.strategy, c.recompute) == (strategy, recompute) and c in plans]
            if len(cases) > 1:
                yield Series(
                    plot="Memory of one device against the number of devices",
                    label=strategy + (", recomputed" if recompute else ""),
                    x=[float(case.devices) for case in cases],
                    y=[plans[case]["buffers"]["total"] / 1e6 for case in cases],
                    x_label="devices",
                    y_label="total, MB",
                )


def readings(found: Measured) -> Iterator[str]:
    """Yield what the numbers say."""
    plans = found.plans
    whole, sharded = Case("NO_SHARD", 8), Case("FULL_SHARD", 8)
    if {whole, sharded} <= plans.keys():
        four = [bytes_of(plans[Case(name, 4)], "total") for name in ("FULL_SHARD", "NO_SHARD")]
        eight = [bytes_of(plans[case], "total") for case in (sharded, whole)]
        yield (
            f"Under FULL_SHARD a device holds {four[0] / four[1]:.2f} of what data parallelism takes on 4 devices, and "
            f"{eight[0] / eight[1]:.2f} on 8; parameters and optimizer state alone are exactly 1/N."
        )
    if set(LONG_PLANS) <= plans.keys():
        parts = [
            bytes_of(plans[recomputed], "total") / bytes_of(plans[plain], "total")
            for plain, recomputed in zip(LONG_PLANS[::2], LONG_PLANS[1::2], strict=True)
        ]
        line = f"Where activations are most of it, recompute leaves {min(parts):.2f} to {max(parts):.2f} of the total"
        times = [spread(recompute_ratios(timing)).middle for timing in found.timings]
        yield line + (f", for {min(times):.2f} to {max(times):.2f} of the time." if times else ".")
    if found.searched:
        times = [times_more(case, found.searched) for case in found.searched if case.strategy == "FULL_SHARD"]
        yield (
            f"In the memory that data parallelism takes, FULL_SHARD trains {min(times):.2f} to {max(times):.2f} times "
            f"the parameters here; PyTorch's FSDP is quoted with {TIMES_MORE_PARAMETERS} times."
        )
    if found.compared:
        most = max(abs(each.off_by) for each in found.compared.values())
        yield f"`torchacc plan`, which needs no device, is within {most:.1%} of what XLA plans."
