"""Read from XLA's own plans what a training step needs on each device, by sharding strategy and number of devices.

    python benchmarks/memory.py
    python benchmarks/memory.py --parts plans search
    python benchmarks/memory.py --parts time --rounds 10
    python benchmarks/memory.py --parts planner --devices 1 2

`plans` compiles each case under SPMD on virtual devices of this machine's CPU, and reads the buffers of one device and
the collectives from the program that XLA has made: bytes are exact, and depend on nothing else that the machine does.
`search` finds the deepest model that each strategy trains in the memory that data parallelism takes for a small one.
`planner` compares what `torchacc plan` says with XLA's plan, for a GPT-2 and a Llama of 124 and 162 million parameters;
with NO_SHARD the step is compiled and not run, as eight copies would take 20 GB of this machine. `time` steps models
with and without recompute in turns, in one process; it alone needs a quiet machine.

Exits with 1 if a case trains to another loss than the others of its model, or a plan is off by more than a tenth; what
is large or slow is reported.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _hlo import Buffers, take_programs, training_program
from _machine import checkout_environment
from _memory_cases import AGAINST_FSDP_V2, LONG_PLANS, PLANNED, PLANS, QUICK, SEARCH, SEARCHES, Case
from _memory_report import Compared, Measured, Plan, Plans, differing_losses, make_report, plans_off
from _results import emit
from _teams import CaseError, Team, progress, running

PARTS = ("plans", "search", "time", "planner")
STEPS_IN_A_TURN = 3


def main() -> int:
    """Run the parts and print the report."""
    args = parse_args()
    if args.worker:
        import _memory_worker  # here, as the parent needs no torch

        _memory_worker.run(args.worker)
        return 0
    cases = QUICK if args.quick else PLANS + AGAINST_FSDP_V2 + LONG_PLANS
    found = Measured(
        plans=measure(cases) if "plans" in args.parts else {},
        searched=search() if "search" in args.parts else {},
        compared=compare_plans([case for case in PLANNED if case.devices in args.devices])
        if "planner" in args.parts
        else {},
        timings=take_turns(args.rounds) if "time" in args.parts else [],
    )
    emit(make_report(found), args.json)
    return 1 if differing_losses(found.plans) or plans_off(found.compared) else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="what to do (default: all)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each timed case (default: 6)")
    parser.add_argument(
        "--devices", nargs="+", type=int, default=[2], metavar="N", help="of `planner`: 1, 2, 4, 8 (default: 2)"
    )
    parser.add_argument("--quick", action="store_true", help="only a few plans, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    args.parts = args.parts or (PARTS[:1] if args.quick else PARTS)
    return args


class Worker(Team):
    """A process that drives a number of devices, which is fixed for its life."""

    def __init__(self, folder: Path) -> None:
        self._dump = folder / "dump"
        self._dump.mkdir()
        super().__init__("memory", [sys.executable, __file__, "--worker", str(self._dump)], folder)
        flags = (checkout_environment().get("XLA_FLAGS"), f"--xla_dump_to={self._dump}", "--xla_dump_hlo_as_text")
        self._variables = {"XLA_FLAGS": " ".join(filter(None, flags))}

    def answer(self, **question: Any) -> Any:
        """Ask the process, and return its answer."""
        return self.ask(**question)[0]

    def compile(self, case: Case) -> Buffers:
        """Return the buffers of a step that is compiled and not run; the process ends of it."""
        try:
            self.ask(compile=asdict(case))
        except CaseError:
            programs = take_programs(self._dump)
            if not programs:
                raise
            return training_program(programs)[0]
        raise AssertionError("a step has run without weights")


@contextmanager
def started() -> Iterator[Worker]:
    """Context manager with a worker."""
    with tempfile.TemporaryDirectory(prefix="memory_") as folder:
        worker = Worker(Path(folder))
        with running([worker]):
            worker.start()
            yield worker


def measure(cases: Sequence[Case]) -> Plans:
    """Return the plan of each case; cases on as many devices share a process."""
    plans: Plans = {}
    for devices in progress(sorted({case.devices for case in cases}), "plans, by devices"):
        with started() as worker:
            for case in dict.fromkeys(case for case in cases if case.devices == devices):
                plans[case] = worker.answer(case=asdict(case))
    return {case: plans[case] for case in cases}


def compare_plans(cases: Sequence[Case]) -> dict[Case, Compared]:
    """Return for each case, in processes of its own, what the memory plan says, and what XLA plans for a step."""
    found = {}
    for case in progress(cases, "planner"):
        with started() as worker:
            if case.devices > 1 and case.strategy == "NO_SHARD":
                measured = worker.compile(case).total
            else:
                measured = worker.answer(case=asdict(case), steps=1)["buffers"]["total"]
        with started() as worker:
            found[case] = Compared(worker.answer(plan=asdict(case))["total"], measured)
    return found


def search() -> Plans:
    """Return the plan of the deepest model of each search, under the case that has its layers."""
    found: Plans = {}
    for devices in sorted({case.devices for case in SEARCHES}):
        with started() as worker:
            budget = replace(SEARCH, devices=devices)
            found[budget] = worker.answer(case=asdict(budget))
            for case in progress([case for case in SEARCHES if case.devices == devices], "search"):
                plans: dict[int, Plan] = {}

                def total(layers: int, case: Case = case, plans: dict[int, Plan] = plans) -> int:
                    deep = replace(case, workload=replace(case.workload, layers=layers))
                    plans[layers] = worker.answer(case=asdict(deep))
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
        with started() as worker:
            given = worker.answer(time=[asdict(case) for case in pair], rounds=rounds, steps=STEPS_IN_A_TURN)
        timings.append({"case": pair[0].name, **given})
    return timings


if __name__ == "__main__":
    sys.exit(main())
