"""Train a GPT-2 of 124 million and a Llama of 1.2 billion parameters on this machine's GPUs, beside FSDP2 by hand.

    python -m benchmarks --profile gpu
    python benchmarks/gpu.py --models "GPT-2 124M" --cases "FSDP2 by hand" FULL_SHARD
    python benchmarks/gpu.py --quick --device cpu    # tiny models, to see that it works; its numbers mean nothing

All compute in bfloat16, with float32 weights and AdamW, in a process for each GPU (XLA: one for all). Cases run one
after the other, as two would not fit in a GPU's memory; a block of steps counts as a round. MFU is the model's
operations against what this GPU does in a product of bfloat16 matrices here, not in a data sheet. On one GPU nothing is
gathered, and prefetching has nothing to do.

Exits with 1 if a case fails or ends with another loss than the others of its model, and with 2 where there is no GPU.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from _gpu_cases import BASE, CASES, LOSS_TOLERANCE, MODELS, QUICK, REASONS, RIVALS, Case, tiny
from _machine import checkout_environment, median_cores
from _markdown import count
from _memory_cases import Workload
from _report import Result
from _results import Check, Comparison, Report, Series, Table, compare, emit
from _teams import SETTLING_STEPS, Team, noting_failure, running, take_turns, warm_up

NO_ACCELERATOR = {"CUDA_VISIBLE_DEVICES": ""}
MATRIX_SIZES, TINY_MATRIX_SIZES = (4096, 8192, 16384), (256,)
HEADER = ["case", "first step s", "step ms", "tokens/s", "MFU", "most GB", "time", "memory"]
NO_GPU = (
    "gpu.py needs a GPU, and PyTorch finds none on this machine; `python benchmarks/gpu.py --quick --device cpu` shows "
    "that it works, with tiny models"
)


@dataclass
class Run:
    """What was measured of all cases of a model."""

    size: Workload
    results: dict[str, Result] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)
    """The most bytes of a device in a step, by case."""


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    if args.worker:
        return work(args)
    import _gpu_worker

    device = args.device or _gpu_worker.find_device()
    if device is None:
        sys.stderr.write(NO_GPU + "\n")
        return 2
    args.device = device
    args.devices = args.devices or (1 if device == "cpu" else _gpu_worker.count_devices())
    found = describe(args)
    runs = {}
    for label in args.models:
        runs[label] = Run(size_of(label, args))
        for case in [case for case in CASES if case.name in args.cases]:
            sys.stderr.write(f"{label}: {case.name}\n")
            measure(case, label, runs[label], args)
    wrong = [line for label, each in runs.items() for line in differing_losses(label, each)]
    emit(make_report(runs, found, wrong, args), args.json)
    return 1 if wrong or any(result.error for each in runs.values() for result in each.results.values()) else 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("--rounds", type=int, help="blocks of steps of each case (default: 5)")
    parser.add_argument("--steps-per-round", type=int, help="steps in one of them (default: 10)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help="; ".join(names))
    parser.add_argument("--devices", type=int, help="how many GPUs (default: all of this machine)")
    parser.add_argument("--device", help="a kind of device, such as cpu (default: this machine's accelerator)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, two cases and one step, to see that it works"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", choices=[*names, "describe"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 5)
    args.steps_per_round = args.steps_per_round or (1 if args.quick else 10)
    args.cases = args.cases or (QUICK if args.quick else names)
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu goes with --quick: the models are too large for it")
    if args.rounds < 1 or args.steps_per_round < 1:
        parser.error("--rounds and --steps-per-round are at least 1")
    return args


def size_of(label: str, args: argparse.Namespace) -> Workload:
    """Return a model, or its tiny relative."""
    return tiny(MODELS[label]) if args.quick else MODELS[label]


def num_steps(args: argparse.Namespace) -> int:
    """Return the steps of a case; on a CPU its memory is read from one more."""
    return 2 + SETTLING_STEPS + args.rounds * args.steps_per_round


def work(args: argparse.Namespace) -> int:
    """Be one of the processes that this program starts."""
    import _gpu_worker

    if args.worker == "describe":
        sizes = {label: size_of(label, args) for label in args.models}
        matrix_sizes = TINY_MATRIX_SIZES if args.quick else MATRIX_SIZES
        sys.stdout.write(json.dumps(_gpu_worker.describe(args.device, sizes, matrix_sizes)) + "\n")
        return 0
    case = next(case for case in CASES if case.name == args.worker)
    _gpu_worker.run(case, size_of(args.models[0], args), args.device, args.devices, num_steps(args))
    return 0


def command(worker: str, models: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Return what starts one of this program's own processes."""
    numbers = {"--devices": args.devices, "--rounds": args.rounds, "--steps-per-round": args.steps_per_round}
    arguments = ["--worker", worker, "--device", args.device, "--models", *models, *(["--quick"] if args.quick else [])]
    for name, number in numbers.items():
        arguments += [name, str(number)]
    return [sys.executable, __file__, *arguments]


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a process of its own finds out about the device, so that this one holds none of its memory."""
    environment = (NO_ACCELERATOR if args.device == "cpu" else {}) | checkout_environment()
    asked = command("describe", args.models, args)
    done = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def measure(case: Case, label: str, run: Run, args: argparse.Namespace) -> None:
    """Run a case of a model, and note what it measures."""
    result = run.results[case.name] = Result(cannot_run=missing_package(case, args.device))
    if not result.takes_part:
        return
    processes = 1 if case.kind == "xla" else args.devices
    environment = environment_of(case, args)
    with tempfile.TemporaryDirectory(prefix="gpu_") as logs:
        team = Team(
            case.name, command(case.name, [label], args), Path(logs), processes=processes, environment=environment
        )
        with running([team]):
            warm_up([team], {case.name: result})
            if result.error is None:
                with noting_failure(team, result):
                    team.ask(facts=True)
            take_turns([team], {case.name: result}, args.rounds, args.steps_per_round)
            if result.error is None:
                with noting_failure(team, result):
                    run.peaks[case.name] = _largest(answer["peak_bytes"] for answer in team.ask(facts=True))
            if result.error is None and args.device == "cpu" and case.kind != "xla":
                with noting_failure(team, result):
                    run.peaks[case.name] = _largest(answer["peak"] for answer in team.ask(memory=True))


def missing_package(case: Case, device: str) -> str | None:
    """Return why a case cannot run where a package that it needs is not installed."""
    if case.kind != "xla":
        return None
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    from torchacc.engines.xla.cuda import installed_plugin

    if device != "cpu" and installed_plugin() is None:
        return "XLA's plugin for CUDA is not installed: pip install 'torchacc[xla-cuda]'"
    return None


def environment_of(case: Case, args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that decide which devices a case finds."""
    if args.device == "cpu":
        return NO_ACCELERATOR | {"CPU_NUM_DEVICES": str(args.devices)}
    return {"PJRT_DEVICE": "CUDA"} if case.kind == "xla" else {}


def _largest(values: Iterator[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def differing_losses(label: str, run: Run) -> list[str]:
    """Return a line for each case of a model whose loss is not that of the others."""
    losses = {name: each.losses[-1] for name, each in run.results.items() if each.error is None and each.losses}
    middle = median(losses.values()) if losses else 0.0
    return [
        f"{label}, {name}: loss {loss:.4f}, and the others' {middle:.4f}"
        for name, loss in losses.items()
        if not abs(loss / middle - 1) <= LOSS_TOLERANCE  # also where it is not a number
    ]


def make_report(
    runs: Mapping[str, Run], found: Mapping[str, Any], wrong: Sequence[str], args: argparse.Namespace
) -> Report:
    """Return all that was measured, and what it says."""
    blocks = [block for run in runs.values() for result in run.results.values() for block in result.blocks.values()]
    failed = [
        Check(f"{label}, {name} failed: {result.error}", "missed")
        for label, run in runs.items()
        for name, result in run.results.items()
        if result.error
    ]
    absent = [
        Check(f"{label}, {name} cannot run: {result.cannot_run}", "reported")
        for label, run in runs.items()
        for name, result in run.results.items()
        if result.cannot_run
    ]
    losses = [Check(line, "missed") for line in wrong] or [Check("the losses of a model's cases agree", "held")]
    return Report(
        name="gpu",
        title="GPU",
        setting=f"{args.devices} x {found['device']}, {found['matrix_flops'] / 1e12:.1f} TFLOP/s in a product of "
        f"bfloat16 matrices; bfloat16, float32 weights, AdamW; {count(args.rounds, 'round')} of "
        f"{count(args.steps_per_round, 'step')}.",
        other_cores=median_cores(block.other_cores for block in blocks),
        tables=[
            Table(
                title=f"{label}, {run.size.batch} x {run.size.length} tokens on each device; `time` and `memory` are "
                f"ratios to {BASE}",
                header=HEADER,
                rows=[table_row(name, label, run, found, args.devices) for name in run.results],
            )
            for label, run in runs.items()
        ],
        checks=[*failed, *absent, *losses],
        comparisons=[each for label, run in runs.items() for each in comparisons(label, run)],
        series=[each for label, run in runs.items() for each in bars(label, run)],
        reading=[line for label, run in runs.items() for line in readings(label, run)],
    )


def table_row(name: str, label: str, run: Run, found: Mapping[str, Any], devices: int) -> list[str]:
    """Return one case's cells under `HEADER`."""
    result, peak = run.results[name], run.peaks.get(name)
    if not result.takes_part:
        return [name, "failed" if result.error else "cannot run", *[""] * (len(HEADER) - 2)]
    secs = step_secs(result)
    tokens = devices * run.size.batch * run.size.length / secs
    mfu = tokens * found["flops_per_token"][label] / (devices * found["matrix_flops"])
    cells = [name, f"{result.first_step_secs:.1f}", f"{1000 * secs:.1f}", f"{tokens:,.0f}", f"{mfu:.1%}"]
    cells.append("" if peak is None else f"{peak / 1e9:.3g}")
    ratios = ratios_to_base(name, run)
    return [*cells, *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)]


def step_secs(result: Result) -> float:
    """Return the median of a case's step times."""
    return median(block.step_secs for block in result.blocks.values())


def ratios_to_base(name: str, run: Run) -> tuple[float | None, float | None]:
    """Return a case's step time and memory over those of `BASE`; None where one of them was not measured."""
    base = run.results.get(BASE)
    if base is None or not base.takes_part or not run.results[name].takes_part:
        return None, None
    peak, base_peak = run.peaks.get(name), run.peaks.get(BASE)
    memory = peak / base_peak if peak is not None and base_peak else None
    return step_secs(run.results[name]) / step_secs(base), memory


def comparisons(label: str, run: Run) -> Iterator[Comparison]:
    """Yield how torchacc compares with FSDP2 by hand, in time and in memory."""
    done = {name: result for name, result in run.results.items() if result.takes_part}
    for name, rival in RIVALS:
        if not {name, rival} <= done.keys():
            continue
        who, reason = f"{rival}, {label}", REASONS.get((name, rival))
        times = [[1000 * block.step_secs for block in done[each].blocks.values()] for each in (name, rival)]
        yield compare(f"step time of {name}", who, *times, "ms", reason=reason)
        peaks = [run.peaks.get(each) for each in (name, rival)]
        if None not in peaks:
            yield compare(f"memory of {name}", who, *([peak / 1e9] for peak in peaks if peak is not None), "GB")


def bars(label: str, run: Run) -> Iterator[Series]:
    """Yield the tokens in a second of each case."""
    names = [name for name, result in run.results.items() if result.takes_part]
    if names:
        yield Series(
            plot=f"{label} on GPUs",
            label="tokens in a second on each device",
            x=list(names),
            y=[run.size.batch * run.size.length / step_secs(run.results[name]) for name in names],
            x_label="case",
            y_label="tokens/s of a device",
        )


def readings(label: str, run: Run) -> Iterator[str]:
    """Yield what each option costs and saves beside `BASE`."""
    for case in CASES:
        if case.kind != "native" or case.name == BASE or case.name not in run.results:
            continue
        time, memory = ratios_to_base(case.name, run)
        if time is not None:
            part = "" if memory is None else f", and {memory:.2f} of its memory"
            yield f"{label}, {case.name}: {time:.2f} of the step time of {BASE}{part}."


if __name__ == "__main__":
    sys.exit(main())
