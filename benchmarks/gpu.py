"""Train a GPT-2 of 124 million parameters, Llamas and a Mixtral on this machine's GPUs, beside FSDP2 by hand.

One Llama has 1.2 billion parameters, also on one sample of 32,768 tokens, and another one as many layers as torchacc's
memory plan has room for on one GPU. The Mixtral has 1.1 billion, of which a token uses a third.

    python -m benchmarks --profile gpu
    python benchmarks/gpu.py --models "largest Llama" --cases "torchtitan's recipe by hand" "FULL_SHARD, recompute"
    python benchmarks/gpu.py --quick --device cpu    # tiny models, to see that it works; its numbers mean nothing

All compute in bfloat16 or float8, with float32 weights and AdamW, in a process for each GPU (XLA: one for all). Cases
run one after the other, as two would not fit in a GPU's memory; a block of steps counts as a round. MFU is the model's
operations against what this GPU does in a product of bfloat16 matrices here, not in a data sheet, also in float8. On
one GPU nothing is gathered, and prefetching has nothing to do.

Exits with 1 if a case fails or ends with another loss than the others of its model, and with 2 where there is no GPU.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from _gpu_cases import (
    BASE,
    CASES,
    FP8_LOSS_TOLERANCE,
    LARGEST,
    LOSS_TOLERANCE,
    MODELS,
    QUICK,
    REASONS,
    RECOMPUTED,
    RIVALS,
    Case,
    tiny,
)
from _machine import median_cores, run_alone
from _markdown import count
from _memory_cases import Workload
from _report import Result
from _results import Check, Comparison, Report, Series, Table, compare, emit, write
from _teams import measure, read_command_line

NO_ACCELERATOR = {"CUDA_VISIBLE_DEVICES": ""}
MATRIX_SIZES, TINY_MATRIX_SIZES = (4096, 8192, 16384), (256,)
HEADER = ["case", "first step s", "step ms", "tokens/s", "MFU", "most GB", "planned GB", "time", "memory"]
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
    args = read_command_line(__doc__, CASES, QUICK, rounds=5, steps=10, add=add_options)
    if args.worker:
        return work(args)
    import _gpu_worker

    args.device = args.device or _gpu_worker.find_device()
    if args.device is None:
        sys.stderr.write(NO_GPU + "\n")
        return 2
    args.devices = args.devices or (1 if args.device == "cpu" else _gpu_worker.count_devices())
    chosen = ["--cases", *(case.name for case in args.cases)]
    found = run_alone(
        [__file__, "--worker", "prepare", *own_options(args, args.models), *chosen],
        NO_ACCELERATOR if args.device == "cpu" else None,
    )
    runs: dict[str, Run] = {}
    for label in args.models:
        runs[label] = Run(size_of(label, args, found["layers"][label]))
        for case in args.cases:
            if case.suits(label):
                sys.stderr.write(f"{label}: {case.name}\n")
                measure_case(case, label, runs[label], args, found["why_no_fp8"])
                row = table_row(case.name, label, runs[label], found, args.devices)
                sys.stderr.write(f"{'  '.join(filter(None, row))}\n")
                if args.json is not None:  # GPUs are rented by the minute: what is measured is kept
                    write(make_report(runs, found, args), args.json)
    report = make_report(runs, found, args)
    emit(report, args.json)
    return 1 if any(check.verdict == "missed" for check in report.checks) else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add which models and which devices."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--devices", type=int, metavar="N", help="how many GPUs (default: all of this machine)")
    parser.add_argument("--xla-path", type=Path, metavar="DIR", help="where torch_xla and its torch are, if not here")
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", help="a kind of device, such as cpu with --quick (default: the accelerator)")


def own_options(args: argparse.Namespace, models: Sequence[str]) -> list[str]:
    """Return the options that this program's own processes get."""
    options = ["--device", args.device, "--devices", str(args.devices), "--models", *models]
    options += ["--xla-path", str(args.xla_path)] if args.xla_path else []
    return [*options, *(["--quick"] if args.quick else [])]


def size_of(label: str, args: argparse.Namespace, layers: int | None) -> Workload:
    """Return a model, or its tiny relative, with so many layers if that is known."""
    size = tiny(MODELS[label]) if args.quick else MODELS[label]
    return size if layers is None else replace(size, layers=layers)


def work(args: argparse.Namespace) -> int:
    """Be one of the processes that this program starts."""
    if args.xla_path and getattr(args.worker, "kind", None) == "xla":
        sys.path.insert(0, str(args.xla_path))
    import _gpu_worker

    if args.worker == "prepare":
        sizes = {label: size_of(label, args, None) for label in args.models}
        if LARGEST in sizes:
            memory = _gpu_worker.memory_of(args.device, args.quick)
            sizes[LARGEST] = _gpu_worker.largest(replace(sizes[LARGEST], layers=MODELS[LARGEST].layers), memory)
        matrix_sizes = TINY_MATRIX_SIZES if args.quick else MATRIX_SIZES
        sys.stdout.write(
            json.dumps(_gpu_worker.describe(args.device, sizes, args.cases, args.devices, matrix_sizes)) + "\n"
        )
        return 0
    size = size_of(args.models[0], args, args.layers)
    _gpu_worker.run(args.worker, size, args.device, args.devices, args.total_steps, quick=args.quick)
    return 0


def measure_case(case: Case, label: str, run: Run, args: argparse.Namespace, why_no_fp8: str | None) -> None:
    """Run a case of a model, and note what it measures. On a CPU its memory is read from one more step."""
    questions = ["facts", *(["memory"] if args.device == "cpu" and case.kind != "xla" else [])]
    run.results |= measure(
        __file__,
        [case],
        args,
        arguments=[*own_options(args, [label]), "--layers", str(run.size.layers)],
        processes=lambda case: 1 if case.kind == "xla" else int(args.devices),
        environment=lambda case: environment_of(case, args),
        cannot_run=lambda case: missing_package(case, args) or (why_no_fp8 if case.fp8 else None),
        questions=lambda case: questions,
        asks_before=True,
    )
    answers = run.results[case.name].answers
    run.peaks[case.name] = _largest(answer.get("peak", answer.get("peak_bytes")) for answer in answers)


def missing_package(case: Case, args: argparse.Namespace) -> str | None:
    """Return why a case cannot run where a package that it needs is not installed."""
    if case.fp8 and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed: pip install 'torchacc[fp8]'"
    if case.kind != "xla":
        return None
    if args.xla_path is None and importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    from torchacc.engines.xla.cuda import installed_plugin

    if args.device != "cpu" and installed_plugin() is None:
        return "XLA's plugin for CUDA is not installed: pip install 'torchacc[xla-cuda]'"
    return None


def environment_of(case: Case, args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that decide which devices a case finds."""
    if args.device == "cpu":
        return NO_ACCELERATOR | {"CPU_NUM_DEVICES": str(args.devices)}
    return {"PJRT_DEVICE": "CUDA"} if case.kind == "xla" else {}


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def differing_losses(label: str, run: Run) -> list[str]:
    """Return a line for each case of a model whose loss is not that of the others."""
    losses = {name: each.losses[-1] for name, each in run.results.items() if each.error is None and each.losses}
    middle = median(losses.values()) if losses else 0.0
    in_fp8 = {case.name for case in CASES if case.fp8}
    return [
        f"{label}, {name}: loss {loss:.4f}, and the others' {middle:.4f}"
        for name, loss in losses.items()
        if not abs(loss / middle - 1) <= (FP8_LOSS_TOLERANCE if name in in_fp8 else LOSS_TOLERANCE)  # also of NaN
    ]


def make_report(runs: Mapping[str, Run], found: Mapping[str, Any], args: argparse.Namespace) -> Report:
    """Return all that was measured, and what it says."""
    wrong = [line for label, each in runs.items() for line in differing_losses(label, each)]
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
                title=f"{label}, {count(run.size.layers, 'layer')}, {run.size.batch} x {run.size.length} tokens on "
                f"each device; `time` and `memory` are ratios to {base_of(run)}",
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
    secs = result.step_secs
    tokens = devices * run.size.batch * run.size.length / secs
    mfu = tokens * found["flops_per_token"][label] / (devices * found["matrix_flops"])
    cells = [name, f"{result.first_step_secs:.1f}", f"{1000 * secs:.1f}", f"{tokens:,.0f}", f"{mfu:.1%}"]
    planned = found["planned"][label].get(name)
    cells += ["" if size is None else f"{size / 1e9:.3g}" for size in (peak, planned)]
    ratios = ratios_to_base(name, run)
    return [*cells, *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)]


def base_of(run: Run) -> str:
    """Return the case that a model's others are compared with."""
    return BASE if BASE in run.results else RECOMPUTED


def ratios_to_base(name: str, run: Run) -> tuple[float | None, float | None]:
    """Return a case's step time and memory over those of its base; None where one of them was not measured."""
    base = run.results.get(base_of(run))
    if base is None or not base.takes_part or not run.results[name].takes_part:
        return None, None
    peak, base_peak = run.peaks.get(name), run.peaks.get(base_of(run))
    memory = peak / base_peak if peak is not None and base_peak else None
    return run.results[name].step_secs / base.step_secs, memory


def comparisons(label: str, run: Run) -> Iterator[Comparison]:
    """Yield how torchacc compares with FSDP2 by hand, in time and in memory."""
    done = {name: result for name, result in run.results.items() if result.takes_part}
    for name, rival in RIVALS:
        if not {name, rival} <= done.keys():
            continue
        who, reason = f"{rival}, {label}", REASONS.get((name, rival))
        times = [[1000 * block.step_secs for block in done[each].blocks.values()] for each in (name, rival)]
        is_same = name != "XLA" and not rival.endswith("torch.compile")
        yield compare(f"step time of {name}", who, *times, "ms", reason=reason, same_runtime=is_same)
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
            y=[run.size.batch * run.size.length / run.results[name].step_secs for name in names],
            x_label="case",
            y_label="tokens/s of a device",
        )


def readings(label: str, run: Run) -> Iterator[str]:
    """Yield what each option costs and saves beside the base."""
    for case in CASES:
        if case.kind != "native" or case.name == base_of(run) or case.name not in run.results:
            continue
        time, memory = ratios_to_base(case.name, run)
        if time is not None:
            part = "" if memory is None else f", and {memory:.2f} of its memory"
            yield f"{label}, {case.name}: {time:.2f} of the step time of {base_of(run)}{part}."


if __name__ == "__main__":
    sys.exit(main())
