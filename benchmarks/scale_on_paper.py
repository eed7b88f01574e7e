"""Compile training steps of large models for hundreds of TPUs and GPUs that are not there.

    python benchmarks/scale_on_paper.py
    python benchmarks/scale_on_paper.py --cases "Llama 8B, v5p:4x4x4" "Llama 70B, h100x64"

Each case is one command, `torchacc plan --config benchmarks/scale_on_paper.yaml --stage … --compile-for …`, with a
cache of its own, so that its seconds and its memory on this machine are those of compiling. All else is what the
compiler says; nothing of it was ever run on such devices. Needs `pip install 'torchacc[plan-tpu,plan-cuda]'`, and half
an hour.

Exits with 1 if a command fails otherwise than for want of a device's memory.
"""

import argparse
import json
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _machine import checkout_environment, run_alone
from _programs import missing_extra
from _results import Check, Report, Table, emit
from _teams import progress

TRAINING_FILE = Path(__file__).with_suffix(".yaml")
PATIENCE_SECS = 480.0
MODELS = {"Llama 8B": "llama_8b", "Llama 70B": "llama_70b", "Mixtral 8x7B": "mixtral_8x7b"}
"""The stages of the training file."""
HEADER = ["case", "of a device's GiB", "compute ms", "memory ms", "wire ms", "cycles ms", "sent GiB", "compiled in s"]
HEADER += ["command s", "host GiB"]
_REFUSED = re.compile(r"does not fit a device.*?Used ([\d.]+[KMG]) of ([\d.]+[KMG])", re.DOTALL)


@dataclass(frozen=True)
class Case:
    """One command."""

    model: str
    topology: str
    options: tuple[str, ...] = ()
    """Of `torchacc plan`, beside the training file."""

    @property
    def name(self) -> str:
        """Return what it is called in the report."""
        return ", ".join(filter(None, [self.model, self.topology, " ".join(self.options)]))


CASES = (
    *(Case("Llama 8B", topology) for topology in ("v5p:4x4x4", "v5p:8x8x8", "v6e:8x8", "h100x64", "h100x512")),
    *(Case("Llama 70B", topology) for topology in ("v5p:4x4x4", "v5p:8x8x8", "v6e:8x8", "v6e:8x16", "v6e:16x16")),
    Case("Llama 70B", "h100x64"),
    *(Case("Mixtral 8x7B", topology) for topology in ("v5p:4x4x4", "v5p:8x8x8", "v6e:8x8", "h100x64")),
)
QUICK = (Case("Llama 8B", "v5p:2x2x1", ("--model-config", "tiny", "--seq", "256")),)


def main() -> int:
    """Compile, and print the report."""
    names = {case.name: case for case in (*CASES, *QUICK)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--cases", nargs="+", choices=names, metavar="CASE", help="; ".join(each.name for each in CASES)
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model on four chips, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        sys.stdout.write(json.dumps(plan(names[args.worker])) + "\n")
        return 0
    if (extra := missing_extra("scale_on_paper")) is not None:
        sys.stderr.write(f"scale_on_paper.py needs the compilers: pip install 'torchacc[{extra}]'\n")
        return 2
    cases = [names[name] for name in args.cases or ()] or list(QUICK if args.quick else CASES)
    found = {case.name: run_alone([__file__, "--worker", case.name]) for case in progress(cases, "programs")}
    emit(make_report(found), args.json)
    return 1 if any("failed" in each for each in found.values()) else 0


def command_of(case: Case) -> list[str]:
    """Return the arguments of Python."""
    of_file = ["--config", str(TRAINING_FILE), "--stage", MODELS[case.model]]
    return ["-m", "torchacc", "plan", *of_file, *case.options, "--compile-for", case.topology, "--json"]


def plan(case: Case) -> dict[str, Any]:
    """Run a case's command, and return what it says, and what it took."""
    with tempfile.TemporaryDirectory(prefix="scale_on_paper_") as cache:
        environment = checkout_environment() | {"XDG_CACHE_HOME": cache}
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *command_of(case)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, errors = process.communicate(timeout=PATIENCE_SECS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # which ends the compiler, too
            process.communicate()
            return {"gave_up": PATIENCE_SECS}
        took = {"command": time.perf_counter() - began}
        took["host"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if process.returncode == 0:
        return took | json.loads(out)
    used = refusal(errors)
    return took | ({"used": used} if used else {"failed": errors.strip().splitlines()[-1]})


def refusal(errors: str) -> tuple[str, ...] | None:
    """Return what the step uses and what a device has, in the words of a compiler that finds no room for it."""
    found = _REFUSED.search(errors)
    return found.groups() if found else None


def make_report(found: Mapping[str, Mapping[str, Any]]) -> Report:
    """Return what the compilers say of all programs."""
    versions = {name: number for each in found.values() for name, number in each.get("versions", {}).items()}
    compilers = ", ".join(f"{name} {number}" for name, number in versions.items())
    return Report(
        name="scale_on_paper",
        title="Large models on hundreds of devices, compiled",
        setting="`torchacc plan --config benchmarks/scale_on_paper.yaml --compile-for …` and the options of each "
        "case: 1 x 4096 tokens on each device, bfloat16 over float32 weights, AdamW, "
        "FULL_SHARD over all devices, layers in a loop"
        f"{f'; {compilers}' if compilers else ''}. Nothing was run on such devices.",
        tables=[
            Table(
                title="What the compiler says of a step on one device, and what compiling took here",
                header=HEADER,
                rows=[row(name, each) for name, each in found.items()],
                note="Bounds are by published speeds, by which the compiler's cycles become milliseconds, too. On TPUs "
                "FLOPs and cycles leave out the kernel of attention; the compiler of GPUs gives no cycles. Host GiB: "
                "the larger of two processes, the one that records the step and the compiler.",
            )
        ],
        checks=[
            Check(f"{name} failed: {each['failed']}", "missed") for name, each in found.items() if "failed" in each
        ],
    )


def row(name: str, found: Mapping[str, Any]) -> list[str]:
    """Return one case's cells under `HEADER`."""
    if "gave_up" in found:
        return [name, f"given up after {found['gave_up']:.0f} s", *[""] * (len(HEADER) - 2)]
    took = [f"{found['command']:.0f}", f"{found['host'] / 2**30:.1f}"]
    if "topology" not in found:
        said = "does not fit: {} of {}".format(*found["used"]) if "used" in found else "failed"
        return [name, said, *[""] * (len(HEADER) - 4), *took]
    fits = "" if found["peak_bytes"] <= found["device_bytes"] else ", does not fit"
    bounds = [found[f"{each}_seconds"] for each in ("compute", "memory", "wire", "cycle")]
    return [
        name,
        f"{found['peak_bytes'] / 2**30:.1f} of {found['device_bytes'] / 2**30:.0f}{fits}",
        *("" if each is None else f"{each * 1e3:,.0f}" for each in bounds),
        f"{sum(each['num_bytes'] for each in found['exchanges']) / 2**30:.1f}",
        f"{found['compile_seconds']:.0f}",
        *took,
    ]


if __name__ == "__main__":
    sys.exit(main())
