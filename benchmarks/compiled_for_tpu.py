"""Compile a training step for TPUs that are not there, beside a plain JAX program of the same model.

    python benchmarks/compiled_for_tpu.py
    python benchmarks/compiled_for_tpu.py --layers 2 --cases "torchacc, plain attention" "JAX, plain attention"

GPT-2 on eight v5e, bfloat16 over float32 weights, sharded by FULL_SHARD: recorded by torchacc, as `torchacc plan
--compile-for` does it, by torch_xla's FSDPv2 class, and written in plain JAX, `_jax_gpt2.py`. All programs go through
the same compiler with the same options, which says what each device holds, moves and sends; nothing of it was ever run
on a TPU. The compiler gives no cycles for the attention kernel, on neither side. Needs `pip install
'torchacc[plan-tpu]'`, and minutes for each program that was not compiled before.

Exits with 1 if a case fails; what is larger than it should be is reported, not an error.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _machine import run_alone
from _memory_cases import Workload
from _programs import missing_extra
from _results import Check, Comparison, Limit, Report, Series, Table, compare, emit
from _teams import progress

if TYPE_CHECKING:
    from torchacc.engines.xla.recording import Program

TOPOLOGY = "v5e:2x4"
DEVICES = 8
VOCABULARY = 50_257
SIZE = Workload(layers=12, width=768, heads=12, vocabulary=VOCABULARY, length=1024, batch=8 * DEVICES)
SMALL = Workload(layers=2, width=128, heads=2, vocabulary=1000, length=128, batch=2 * DEVICES)
JAX_PROGRAM = Path(__file__).with_name("_jax_gpt2.py")
ATTENTIONS = {"plain": "sdpa", "in blocks": "auto", "kernel": "flash"}
"""What is compared, and the value of `compute.attention` for it on TPUs."""


@dataclass(frozen=True)
class Case:
    """One program."""

    name: str
    by: str
    attention: str
    between: str = "float32"
    """The dtype of embeddings, their sum with what the layers add, and GELU: under PyTorch's autocast float32."""


CASES = (
    Case("torchacc, plain attention", "torchacc", "plain"),
    Case("JAX, plain attention", "JAX", "plain"),
    Case("torchacc, attention in blocks", "torchacc", "in blocks"),
    Case("torchacc, kernel", "torchacc", "kernel"),
    Case("JAX, kernel", "JAX", "kernel"),
    Case("FSDPv2, plain attention", "FSDPv2", "plain"),
    Case("JAX, plain attention, bfloat16 throughout", "JAX", "plain", between="bfloat16"),
    Case("JAX, kernel, bfloat16 throughout", "JAX", "kernel", between="bfloat16"),
)


@dataclass(frozen=True)
class Measure:
    """A number that the compiler gives."""

    name: str
    key: str
    unit: str
    scale: float
    part: float
    """What it may be of JAX's."""


MEASURES = (
    Measure("memory", "memory", "GB", 1e9, 1.05),
    Measure("bytes moved", "moved", "GB", 1e9, 1.10),
    Measure("estimated cycles", "cycles", "M", 1e6, 1.10),
    Measure("collective bytes", "sent", "MB", 1e6, 1.05),
)
OF_FSDP_V2 = {"memory": 0.85, "sent": 0.85}
"""What two of them may be of torch_xla's FSDPv2 class, where activations weigh more than weights; by default, as a user
of each has it: torchacc computes attention in blocks on TPUs, and FSDPv2 leaves it to PyTorch."""
BY_DEFAULT = "in blocks"
HEADER = ["case", *(f"{each.name} {each.unit}" for each in MEASURES), "collectives", "compiled in s"]

Found = Mapping[str, Mapping[str, Any]]
"""What the compiler says of each case's program, by name."""


def main() -> int:
    """Compile the programs and print the report."""
    args = parse_args()
    if args.worker is not None:
        return work(args.worker, args.size)
    if (extra := missing_extra("compiled_for_tpu")) is not None:
        sys.stderr.write(f"compiled_for_tpu.py needs the compiler of TPUs: pip install 'torchacc[{extra}]'\n")
        return 2
    found: dict[str, Mapping[str, Any]] = {}
    failed: dict[str, str] = {}
    for case in progress(args.cases, "programs"):
        try:
            found[case.name] = run_alone([__file__, "--worker", case.name, *args.sizes])
        except subprocess.CalledProcessError as error:
            failed[case.name] = f"ended with {error.returncode}"
    emit(make_report(found, failed, args.size, judges=args.size == SIZE), args.json)
    return 1 if failed else 0


def parse_args() -> argparse.Namespace:
    """Read the command line; `size` is what is trained, and `sizes` the options that say so."""
    names = {case.name: case for case in CASES}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=names, default=list(names), metavar="CASE", help="; ".join(names))
    parser.add_argument("--layers", type=int, metavar="N", help=f"of the model (default: {SIZE.layers})")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.cases = [case for case in CASES if case.name in args.cases]
    args.worker = names.get(args.worker)
    size = SMALL if args.quick else SIZE
    args.size = size if args.layers is None else replace(size, layers=args.layers)
    args.sizes = ["--layers", str(args.size.layers), *(["--quick"] if args.quick else [])]
    return args


def work(case: Case, size: Workload) -> int:
    """Compile a case's program, and print what the compiler says of it."""
    from torchacc.aot.compiler import compile_program
    from torchacc.aot.step_report import make_report
    from torchacc.aot.topologies import find_topology

    topology = find_topology(TOPOLOGY)
    program = {"torchacc": record, "JAX": lower, "FSDPv2": record_fsdp_v2}[case.by](case, size)
    compiled = compile_program(program, topology, lambda _: None)
    report = make_report(compiled, topology, topology.device_bytes(None), None)
    found = {
        "memory": report.peak_bytes,
        "moved": report.bytes_accessed,
        "cycles": report.cycles,
        "sent": sum(each.num_bytes for each in report.exchanges),
        "exchanges": ", ".join(f"{each.count} {each.kind}" for each in report.exchanges),
        "secs": report.compile_seconds,
        "versions": report.versions,
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def record(case: Case, size: Workload) -> "Program":
    """Record torchacc's step."""
    from torchacc.engines.xla import runtime

    runtime.prepare_import()
    import torch
    from _models import make_gpt2

    from torchacc import Config
    from torchacc.aot.recorded_step import record_step

    with torch.device("meta"):
        model = make_gpt2(size.layers, size.width, size.heads, size.vocabulary, size.length)
    tokens = torch.zeros(size.batch, size.length, dtype=torch.long, device="meta")
    config = Config()
    config.compute.bf16, config.compute.attention = True, ATTENTIONS[case.attention]
    config.dist.fsdp.size = DEVICES
    batch = {"input_ids": tokens, "labels": tokens}
    return record_step(model, batch, config, partial(torch.optim.AdamW, lr=1e-3), num_devices=DEVICES, platform="TPU")


def record_fsdp_v2(case: Case, size: Workload) -> "Program":
    """Record the same step by torch_xla's FSDPv2 class, with weights and state on virtual devices of the CPU."""
    from torchacc.engines.xla import runtime

    runtime.prepare_import()
    runtime.start(num_devices=DEVICES, spmd=True)
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    from _models import make_gpt2
    from _rivals import wrap_fsdp_v2
    from torch_xla import _XLAC
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import _prepare_spmd_partition_spec

    from torchacc.engines.xla.recording import Input, Program

    mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), ("fsdp",))
    model = make_gpt2(size.layers, size.width, size.heads, size.vocabulary, size.length).to(torch_xla.device())
    model.tie_weights()
    wrapped = wrap_fsdp_v2(model, mesh)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    kept = list(wrapped.parameters())
    for parameter in wrapped.parameters():
        # Split as its parameter, which in a first step is left to the partitioner.
        moments = [torch.zeros_like(parameter) for _ in range(2)]
        for moment in moments:
            xs.mark_sharding(moment, mesh, _prepare_spmd_partition_spec(parameter))
        optimizer.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        optimizer.state[parameter]["step"] = torch.tensor(0.0)
        kept += moments
    tokens = torch.zeros(size.batch, size.length, dtype=torch.long, device=torch_xla.device())
    xs.mark_sharding(tokens, mesh, ("fsdp", None))
    torch_xla.sync()
    shardings = {_XLAC._xla_get_tensor_id(each): _XLAC._get_xla_sharding_spec(each) for each in (*kept, tokens)}
    donated = {_XLAC._xla_get_tensor_id(each) for each in kept}
    with torch.autocast("xla", torch.bfloat16):
        loss = wrapped(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    outputs = [loss.detach(), *kept]
    numbers, _ = _XLAC._get_tensors_xla_device_data_node(outputs)
    inputs = [Input(shardings.get(number, "{replicated}"), number in donated) for number in numbers]
    return Program(_XLAC._get_xla_tensors_hlo_proto(outputs), tuple(inputs))


def lower(case: Case, size: Workload) -> "Program":
    """Let JAX, in a process of its own, write the same step."""
    from torchacc.aot.compiler import VARIABLES
    from torchacc.engines.xla.recording import Input, Program
    from torchacc.env import with_variables

    sizes = {name: value for name, value in asdict(size).items() if name != "family"}
    step = {**sizes, "topology": TOPOLOGY, "batch": size.batch // DEVICES}
    step |= {"attention": case.attention, "between": case.between}
    with tempfile.TemporaryDirectory(prefix="jax_") as name:
        folder = Path(name)
        (folder / "step.json").write_text(json.dumps(step))
        command = [sys.executable, "-I", str(JAX_PROGRAM), name]
        done = subprocess.run(command, env=with_variables(VARIABLES), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{JAX_PROGRAM.name} ended with {done.returncode}: {done.stderr[-2000:]}")
        inputs = json.loads((folder / "inputs.json").read_text())
        return Program((folder / "program.pb").read_bytes(), tuple(Input(**each) for each in inputs))


def make_report(found: Found, failed: Mapping[str, str], size: Workload, *, judges: bool) -> Report:
    """Return what the compiler says of all programs, and whether it is what was expected."""
    versions = next((each["versions"] for each in found.values()), {})
    compiler = ", ".join(f"{name} {number}" for name, number in versions.items())
    return Report(
        name="compiled_for_tpu",
        title="Compiled for TPUs, beside plain JAX",
        setting=f"GPT-2 of {size} over {DEVICES} devices, a vocabulary of {size.vocabulary:,}, bfloat16 over float32 "
        f"weights, AdamW, FULL_SHARD, no dropout, compiled for {TOPOLOGY}{f' by {compiler}' if compiler else ''}; "
        "nothing was run on a TPU.",
        tables=[
            Table(
                title="What the compiler says of one device, and how often it exchanges",
                header=HEADER,
                rows=[row(name, each) for name, each in found.items()],
            )
        ],
        checks=[
            *(list(judgements(found, failed)) if judges else []),
            *(Check(f"{name} {why}", "missed") for name, why in failed.items()),
        ],
        comparisons=list(comparisons(found)) if judges else [],
        series=list(bars(found)),
        reading=list(readings(found)),
    )


def row(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    numbers = [f"{found[each.key] / each.scale:.2f}" for each in MEASURES]
    return [name, *numbers, found["exchanges"], f"{found['secs']:.0f}"]


ATTENTION_NAMES = {"plain": "plain attention", "in blocks": "attention in blocks", "kernel": "the attention kernel"}


def pairs(found: Found, by: str = "JAX") -> Iterator[tuple[Case, Case]]:
    """Yield the cases of torchacc, each with a rival's with the same attention, that in the same dtypes first."""
    for ours in (case for case in CASES if case.by == "torchacc" and case.name in found):
        for theirs in (case for case in CASES if case.by == by and case.name in found):
            if ours.attention == theirs.attention or (by == "FSDPv2" and ours.attention == BY_DEFAULT):
                yield ours, theirs


def judgements(found: Found, failed: Mapping[str, str]) -> Iterator[Check]:
    """Yield a check of each number: it has a limit beside a program in the same dtypes, and is told beside another."""
    for ours, theirs in pairs(found):
        for each in MEASURES:
            limit = Limit(ours.name, theirs.name, each.part if ours.between == theirs.between else None)
            yield limit.judge(each.name, [ratio(found, ours, theirs, each)], failed=bool(failed))
    for ours, theirs in pairs(found, "FSDPv2"):
        for each in (each for each in MEASURES if each.key in OF_FSDP_V2):
            limit = Limit(ours.name, theirs.name, OF_FSDP_V2[each.key] if ours.attention == BY_DEFAULT else None)
            yield limit.judge(each.name, [ratio(found, ours, theirs, each)], failed=bool(failed))


def comparisons(found: Found) -> Iterator[Comparison]:
    """Yield how each number compares with that of a JAX program in the same dtypes."""
    for ours, theirs in pairs(found):
        if ours.between == theirs.between:
            for each in MEASURES:
                own, other = ([found[case.name][each.key] / each.scale] for case in (ours, theirs))
                yield compare(f"{each.name}, {ATTENTION_NAMES[ours.attention]}", "plain JAX", own, other, each.unit)
    for ours, theirs in pairs(found, "FSDPv2"):
        for each in MEASURES:
            own, other = ([found[case.name][each.key] / each.scale] for case in (ours, theirs))
            name = f"{each.name}, {ATTENTION_NAMES[ours.attention]}, compiled for {TOPOLOGY}"
            yield compare(name, "torch_xla's FSDPv2 class", own, other, each.unit)


def bars(found: Found) -> Iterator[Series]:
    """Yield the ratios to JAX in the same dtypes."""
    for ours, theirs in pairs(found):
        if ours.between == theirs.between:
            yield Series(
                plot="A step compiled for TPUs, over plain JAX's",
                label=ATTENTION_NAMES[ours.attention],
                x=[each.name for each in MEASURES],
                y=[ratio(found, ours, theirs, each) for each in MEASURES],
                x_label="what the compiler says",
                y_label="ratio to plain JAX",
            )


def readings(found: Found) -> Iterator[str]:
    """Yield what torchacc's programs are of those of JAX in the same dtypes."""
    for ours, theirs in pairs(found):
        if ours.between == theirs.between:
            parts = ", ".join(f"{ratio(found, ours, theirs, each):.2f} of the {each.name}" for each in MEASURES)
            yield f"With {ATTENTION_NAMES[ours.attention]} torchacc's step has {parts} of plain JAX's."


def ratio(found: Found, ours: Case, theirs: Case, measure: Measure) -> float:
    """Return torchacc's number over JAX's."""
    return float(found[ours.name][measure.key] / found[theirs.name][measure.key])


if __name__ == "__main__":
    sys.exit(main())
