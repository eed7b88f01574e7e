"""Read from XLA's own plans what a training step needs on each device, by sharding strategy and number of devices.

    python benchmarks/memory.py
    python benchmarks/memory.py --parts plans search
    python benchmarks/memory.py --parts time --rounds 10
    python benchmarks/memory.py --parts planner --devices 1 2

`plans` compiles each case under SPMD on virtual devices of this machine's CPU, and reads the buffers of one device and
the collectives from the program that XLA has made: bytes are exact, and depend on nothing else that the machine does.
`search` finds the deepest model that each strategy trains in the memory that data parallelism takes for a small one.
`planner` compares what `torchacc plan` says with XLA's plan, for a GPT-2 and a Llama of 124 and 162 million parameters;
NO_SHARD takes 20 GB of this machine on 8 devices, and half of that on 4. `time` steps models with and without recompute
in turns, in one process; it alone needs a quiet machine.

Exits with 1 if a case trains to another loss than the others of its model, or a plan is off by more than a tenth; what
is large or slow is reported.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from _machine import PACKAGES, checkout_environment, describe_other_work, machine_facts
from _markdown import render_table
from _memory_cases import (
    AGAINST_FSDP_V2,
    EXPECTATIONS,
    LONG_PLANS,
    PLAN_TOLERANCE,
    PLANNED,
    PLANS,
    RECOMPUTE_TIME,
    SEARCH,
    SEARCHES,
    TIMES_MORE_PARAMETERS,
    Case,
    Share,
    Workload,
)
from _report import LOSS_TOLERANCE
from _results import spread
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("plans", "search", "time", "planner")
STEPS_IN_A_TURN = 3
HEADER = ("case", "parameters and state MB", "temporary MB", "total MB", "part", "gathers", "reductions", "other")
SEARCH_HEADER = ("case", "layers", "parameters", "total MB", "times data parallel's")
PLANNER_HEADER = ("model", "case", "planned MB", "XLA's MB", "off by")
TIME_HEADER = ("case", "s", "recomputed s", "ratio", "quartiles")

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


def main() -> int:
    """Run the parts and print their reports."""
    args = parse_args()
    if args.worker:
        import _memory_worker  # here, as the parent needs no torch

        _memory_worker.run(args.worker)
        return 0
    facts = machine_facts()
    sys.stdout.write(f"{facts['cores']} cores; " + ", ".join(f"{name} {facts[name]}" for name in PACKAGES) + "\n")
    wrong: list[str] = []
    raw: dict[str, Any] = {"machine": facts}
    if "plans" in args.parts:
        plans = measure([*PLANS, *AGAINST_FSDP_V2, *LONG_PLANS])
        wrong = differing_losses(plans)
        sys.stdout.write(make_report(plans, wrong))
        raw["plans"] = [asdict(case) | plan for case, plan in plans.items()]
    if "search" in args.parts:
        found = search()
        sys.stdout.write(make_search_report(found))
        raw["search"] = [asdict(case) | plan for case, plan in found.items()]
    if "planner" in args.parts:
        compared = compare([case for case in PLANNED if case.devices in args.devices])
        wrong += [case.name for case, found in compared.items() if abs(found.off_by) > PLAN_TOLERANCE]
        sys.stdout.write(make_planner_report(compared))
        raw["planner"] = [asdict(case) | asdict(found) for case, found in compared.items()]
    if "time" in args.parts:
        timings = take_turns(args.rounds)
        sys.stdout.write(make_time_report(timings))
        raw["time"] = timings
    if args.json:
        args.json.write_text(json.dumps(raw, indent=1) + "\n")
    return 1 if wrong else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS[:-1], help="what to do (default: all but planner)"
    )
    parser.add_argument("--rounds", type=int, default=10, help="turns of each timed case (default: 10)")
    parser.add_argument(
        "--devices", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help="of `planner` (default: 1 2 4 8)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    return args


class Worker(AbstractContextManager["Worker"]):
    """A process that drives a number of devices, which is fixed for its life."""

    def __enter__(self) -> "Worker":
        self._folder = tempfile.TemporaryDirectory(prefix="memory_")
        dump = Path(self._folder.name, "dump")
        dump.mkdir()
        environment = checkout_environment()
        flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
        environment["XLA_FLAGS"] = " ".join(filter(None, [environment.get("XLA_FLAGS"), flags]))
        self._log = Path(self._folder.name, "log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--worker", str(dump)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def ask(self, **question: Any) -> Any:
        """Return the process's answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"a worker ended, after it wrote:\n{self._log.read_text(errors='replace')[-3000:]}")
        return json.loads(answer)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def measure(cases: Sequence[Case]) -> Plans:
    """Return the plan of each case; cases on as many devices share a process."""
    plans: Plans = {}
    with tqdm(total=len(cases), desc="plans", file=sys.stderr, dynamic_ncols=True) as progress:
        for devices in sorted({case.devices for case in cases}):
            with Worker() as worker:
                for case in cases:
                    if case.devices == devices:
                        plans[case] = plans.get(case) or worker.ask(case=asdict(case))
                        progress.update()
    return {case: plans[case] for case in cases}


def compare(cases: Sequence[Case]) -> dict[Case, Compared]:
    """Return for each case, in a process of its own, what the memory plan says, and what XLA plans for a step."""
    found = {}
    for case in tqdm(cases, desc="planner", file=sys.stderr, dynamic_ncols=True):
        with Worker() as worker:
            # In this order, as XLA cannot start in a process that has run another backward.
            measured = worker.ask(case=asdict(case), steps=1)["buffers"]["total"]
            found[case] = Compared(worker.ask(plan=asdict(case))["total"], measured)
    return found


def search() -> Plans:
    """Return the plan of the deepest model of each search, under the case that has its layers."""
    found: Plans = {}
    for devices in sorted({case.devices for case in SEARCHES}):
        with Worker() as worker:
            budget = replace(SEARCH, devices=devices)
            found[budget] = worker.ask(case=asdict(budget))
            for case in tqdm([case for case in SEARCHES if case.devices == devices], file=sys.stderr):
                plans: dict[int, Plan] = {}

                def total(layers: int, case: Case = case, plans: dict[int, Plan] = plans) -> int:
                    deep = replace(case, workload=replace(case.workload, layers=layers))
                    plans[layers] = worker.ask(case=asdict(deep))
                    return int(plans[layers]["buffers"]["total"])

                layers = deepest(total, case.workload.layers, found[budget]["buffers"]["total"])
                found[replace(case, workload=replace(case.workload, layers=layers))] = plans[layers]
    return found


def deepest(total: Callable[[int], int], start: int, budget: int) -> int:
    """Return the most layers that fit.

    Args:
        total: Bytes for a number of layers. They grow evenly, or nearly so, which leads the search.
        start: A number of layers that fits.
        budget: The bytes that there are.
    """
    known = {layers: total(layers) for layers in (start, 2 * start)}
    while True:
        fits = max(layers for layers, size in known.items() if size <= budget)
        too_deep = min((layers for layers, size in known.items() if size > budget), default=None)
        if too_deep == fits + 1:
            return fits
        below, above = sorted(known)[-2:]
        each = (known[above] - known[below]) / (above - below)
        guess = max(fits + 1, fits + int((budget - known[fits]) / each))
        guess = guess if too_deep is None else min(guess, too_deep - 1)
        known[guess] = total(guess)


def take_turns(rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of each pair of `LONG_PLANS`, without and with recompute, by round."""
    timings = []
    for pair in zip(LONG_PLANS[::2], LONG_PLANS[1::2], strict=True):
        with Worker() as worker:
            given = worker.ask(time=[asdict(case) for case in pair], rounds=rounds, steps=STEPS_IN_A_TURN)
        timings.append({"case": pair[0].name, **given})
    return timings


def differing_losses(plans: Plans) -> list[str]:
    """Return a line for each case whose loss is not that of the first one with the same model and batch."""
    first: dict[Workload, tuple[Case, float]] = {}
    wrong = []
    for case, plan in plans.items():
        reference, loss = first.setdefault(case.workload, (case, plan["loss"]))
        if not abs(plan["loss"] / loss - 1) <= LOSS_TOLERANCE:
            wrong.append(f"{case.name}: loss {plan['loss']:.6f}, and {reference.name} {loss:.6f}")
    return wrong


def bytes_of(plan: Plan, what: str) -> int:
    """Return a plan's `total` or `updated` bytes, or those of its collectives' results, `traffic`."""
    if what == "traffic":
        return sum(int(found["size"]) for found in plan["traffic"].values())
    return int(plan["buffers"][what])


def judge(expectation: Share, plans: Plans) -> str:
    """Return one line: what is expected, what was measured, and whether that holds."""
    case, reference = expectation.case, expectation.reference
    part = bytes_of(plans[case], expectation.what) / bytes_of(plans[reference], expectation.what)
    held = part == expectation.limit if expectation.exactly else part <= expectation.limit
    sign = "=" if expectation.exactly else "<="
    what = {"updated": "parameters and state", "total": "total", "traffic": "collectives"}[expectation.what]
    where = "" if case.workload == PLANS[0].workload else f" ({case.workload})"
    line = f"{what} of {case.name} {sign} {expectation.limit:g} of {reference.name}{where}"
    return f"{line}: {part:.4g}, {'HELD' if held else 'MISSED'}"


def table_row(case: Case, plans: Plans) -> list[str]:
    """Return one case's cells under `HEADER`; the part is that of the first case on as many devices."""
    plan = plans[case]
    alike = [other for other in plans if (other.workload, other.devices) == (case.workload, case.devices)]
    traffic = plan["traffic"]

    def collectives(*kinds: str) -> str:
        found = [traffic[kind] for kind in kinds if kind in traffic]
        return " + ".join(f"{each['count']} / {_mb(each['size'])}" for each in found)

    return [
        case.name,
        _mb(plan["buffers"]["updated"]),
        _mb(plan["buffers"]["temp"]),
        _mb(plan["buffers"]["total"]),
        f"{plan['buffers']['total'] / plans[alike[0]]['buffers']['total']:.3f}",
        collectives("all-gather"),
        collectives("all-reduce", "reduce-scatter"),
        collectives("all-to-all", "collective-permute"),
    ]


def make_report(plans: Plans, wrong: Sequence[str]) -> str:
    """Return a table for each workload, and below them the losses and the checks."""
    lines = []
    for workload in dict.fromkeys(case.workload for case in plans):
        cases = [case for case in plans if case.workload == workload]
        rows = [table_row(case, plans) for case in cases]
        lines += ["", f"GPT-2, {workload}, float32, AdamW; bytes of one device, collectives as number / MB", ""]
        lines += [render_table(HEADER, rows)]
    lines += ["", *([f"- WRONG LOSS {line}" for line in wrong] or ["- the losses agree"])]
    lines += [f"- {judge(expectation, plans)}" for expectation in EXPECTATIONS]
    return "\n".join(lines) + "\n"


def make_search_report(found: Plans) -> str:
    """Return the table of the deepest models, and below it how they compare with what PyTorch's documentation says."""
    rows, lines = [], []
    for case, plan in found.items():
        of_budget = next(other for budget, other in found.items() if budget.devices == case.devices)
        times = plan["num_parameters"] / of_budget["num_parameters"]
        total = _mb(plan["buffers"]["total"])
        rows.append([case.name, str(case.workload.layers), f"{plan['num_parameters']:,}", total, f"{times:.2f}"])
        if case.strategy == "FULL_SHARD":
            verdict = "HELD" if times >= TIMES_MORE_PARAMETERS else "MISSED"
            lines.append(f"- parameters of {case.name} >= {TIMES_MORE_PARAMETERS} x NO_SHARD's: {times:.2f}, {verdict}")
    title = f"the deepest GPT-2 of width {SEARCH.workload.width} in the memory that NO_SHARD takes for the first"
    return "\n".join(["", title, "", render_table(SEARCH_HEADER, rows), "", *lines]) + "\n"


def make_planner_report(compared: Mapping[Case, Compared]) -> str:
    """Return the table of what is planned and what XLA plans, and below it whether they agree."""
    rows = [
        [case.workload.family, case.name, _mb(found.planned), _mb(found.measured), f"{100 * found.off_by:+.1f} %"]
        for case, found in compared.items()
    ]
    most = max((abs(found.off_by) for found in compared.values()), default=0.0)
    verdict = "HELD" if most <= PLAN_TOLERANCE else "MISSED"
    line = f"- the memory plan is off by <= {PLAN_TOLERANCE:.0%} of XLA's: {most:.1%}, {verdict}"
    return "\n".join(["", render_table(PLANNER_HEADER, rows), "", line]) + "\n"


def make_time_report(timings: Sequence[dict[str, Any]]) -> str:
    """Return the table of step times, and below it what was expected, and how far they can be trusted."""
    rows, lines = [], []
    for timing in timings:
        plain, recomputed = timing["secs"]
        ratio = spread([own / other for own, other in zip(recomputed, plain, strict=True)])
        times = [f"{spread(secs).middle:.3f}" for secs in (plain, recomputed)]
        rows.append([timing["case"], *times, f"{ratio.middle:.3f}", f"{ratio.low:.3f} .. {ratio.high:.3f}"])
        verdict = "HELD" if ratio.middle <= RECOMPUTE_TIME else "MISSED"
        unsure = ", within the noise" if ratio.low <= RECOMPUTE_TIME < ratio.high else ""
        lines.append(f"- time of {timing['case']} with recompute <= {RECOMPUTE_TIME}: {ratio}, {verdict}{unsure}")
    others = [timing["other_cores"] for timing in timings if timing["other_cores"] is not None]
    lines += [f"- {describe_other_work(others)}"] if others else []
    title = f"GPT-2, {LONG_PLANS[0].workload}; {len(timings[0]['secs'][0])} rounds of {STEPS_IN_A_TURN} steps"
    return "\n".join(["", title, "", render_table(TIME_HEADER, rows), "", *lines]) + "\n"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"


if __name__ == "__main__":
    sys.exit(main())
