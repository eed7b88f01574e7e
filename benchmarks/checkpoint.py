"""Put rank files together, with torchacc and with torch_xla; save and load a live model, beside plain files and dcp.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --rounds 10 --folder /scratch

The files are those of torch_xla's FSDP on 4 ranks, with 400 MB of model and 800 MB of AdamW. Each run is a process of
its own, and the cases take turns. Memory is the peak that the system saw while the function ran, less what the process
had before. The files are in the page cache; torchacc's time includes that the result has reached the disk, torch_xla's
does not, and nothing of one run is left to be written in the next.

The second part saves and loads a model of that size with its AdamW, native on 4 ranks, in turns with plain file I/O of
the same bytes (each rank its own file, synced) and with torch.distributed.checkpoint (dcp). Each time is that of the
slowest rank. `load` finds its files in the page cache, `cold load` on the disk. Both go on with a run as a new process
does: the model is there, and its optimizer has no state yet, so that two thirds of the bytes go into memory that the
system has to hand out first, for the plain read as well. `reload` goes into a model and an optimizer that have been
trained. `async save` is what the step waits for: until the save has returned, and in the step that follows until its
optimizer may begin.

Exits with 1 if a case fails or the results differ; what is slow or large is reported, not an error.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _checkpoint_cases import (
    AGAINST_DCP,
    CASES,
    EXPECTATIONS,
    LIVE_EXPECTATIONS,
    LIVE_RANKS,
    LIVE_REFERENCES,
    RANKS,
    UNITS,
    Case,
    Faster,
    Lean,
    Share,
)
from _machine import OtherWork, checkout_environment, median_cores
from _markdown import count
from _results import Check, Comparison, Report, Series, Spread, Table, compare, emit, spread
from tqdm import tqdm

LIVE_HEADER = ["case", "s", "GB/s", "part", "quartiles", "of"]
HEADER = ["case", "s", "CPU s", "extra memory MB", "times faster", "quartiles", "than"]
QUICK_UNITS = 2

Runs = dict[str, list[dict[str, Any]]]
"""What was measured of each case, by round."""
Live = dict[str, Any]
"""What was measured of the second part: its `bytes`, and the `secs` of each case by round."""


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    if args.worker:
        import _checkpoint_worker  # here, as the parent needs no torch

        _checkpoint_worker.run(args.worker, args.folder, args.target)
        return 0
    if args.make_files:
        import _checkpoint_worker

        _checkpoint_worker.make_files(args.folder, args.units)
        return 0
    with tempfile.TemporaryDirectory(prefix="checkpoint_", dir=args.folder) as name:
        folder = Path(name)
        call("--make-files", "--folder", name, "--units", str(args.units))
        runs = take_turns(folder, args.rounds)
        live = run_live(folder, args.rounds, args.units)
    agree = len({run["digest"] for of_case in runs.values() for run in of_case}) == 1
    emit(make_report(runs, live, agree), args.json)
    return 0 if agree else 1


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6, help="runs of each case (default: 6)")
    parser.add_argument("--folder", type=Path, help="where to write 5 GB for a while (default: for temporary files)")
    parser.add_argument("--quick", action="store_true", help="one round of a small model, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--units", type=int, default=UNITS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make-files", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    if args.quick:
        args.rounds, args.units = 1, QUICK_UNITS
    return args


def take_turns(folder: Path, rounds: int) -> Runs:
    """Run each case once in each round, every second one backwards."""
    runs: Runs = {case.name: [] for case in CASES}
    turns = [case for index in range(rounds) for case in (CASES if index % 2 == 0 else reversed(CASES))]
    for case in tqdm(turns, desc="runs", file=sys.stderr, dynamic_ncols=True):
        target = folder / "out.pth"
        os.sync()
        other_work = OtherWork()
        measured = json.loads(call("--worker", case.name, "--folder", str(folder), "--target", str(target)))
        measured["other_cores"] = other_work.cores()
        runs[case.name].append(measured)
        target.unlink()
    return runs


def run_live(folder: Path, rounds: int, units: int) -> Live:
    """Run the second part."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={LIVE_RANKS}"]
    worker = str(Path(__file__).with_name("_checkpoint_live.py"))
    sizes = ["--rounds", str(rounds), "--units", str(units)]
    other_work = OtherWork()
    found: Live = json.loads(launch(*launcher, worker, "--folder", str(folder), *sizes))
    return {**found, "other_cores": other_work.cores()}


def call(*arguments: str) -> str:
    """Run this file in a process of its own and return the last line that it prints."""
    return launch(__file__, *arguments)


def launch(*command: str) -> str:
    """Run Python in a process of its own and return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, *command], env=checkout_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip().rpartition("\n")[2]


def make_report(runs: Runs, live: Live, agree: bool) -> Report:
    """Return all that was measured, and whether it is what was expected."""
    secs, gigabytes = live["secs"], live["bytes"] / 1e9
    measured = [run.get("other_cores") for of_case in runs.values() for run in of_case]
    return Report(
        name="checkpoint",
        title="Checkpoints",
        setting=f"{1000 * gigabytes / 3:.0f} MB of model and {2000 * gigabytes / 3:.0f} MB of AdamW, on {RANKS} ranks; "
        f"{count(len(runs[CASES[0].name]), 'round')}.",
        other_cores=median_cores([*measured, live.get("other_cores")]),
        tables=[
            Table(
                title="Rank files of torch_xla's FSDP, consolidated",
                header=HEADER,
                rows=[table_row(case, runs) for case in CASES],
            ),
            Table(
                title=f"A live model saved and loaded, native on {LIVE_RANKS} ranks, beside plain files of the same "
                "bytes and `torch.distributed.checkpoint` (dcp)",
                header=LIVE_HEADER,
                rows=[live_row(case, reference, live) for case, reference in LIVE_REFERENCES.items()],
                note="`load` finds its files in the page cache, `cold load` on the disk. Both go on with a run as a "
                "new process does, whose optimizer has no state: two thirds of the bytes go into memory that the "
                "system has to hand out first, for the plain read as well. `reload` goes into a model and an optimizer "
                "that have been trained. `async save` is what training waits for: until the save returns, and before "
                "the next step of the optimizer until all is copied.",
            ),
        ],
        checks=[
            Check("the results of consolidation agree, bit for bit", "held" if agree else "missed"),
            *(judge(expectation, runs) for expectation in EXPECTATIONS),
            *(judge_share(expectation, secs) for expectation in LIVE_EXPECTATIONS),
        ],
        comparisons=list(comparisons(runs, secs)),
        series=list(bars(runs, secs)),
        reading=list(readings(runs, secs)),
    )


def live_row(case: str, reference: str, live: Live) -> list[str]:
    """Return one live case's cells under `LIVE_HEADER`."""
    middle = statistics.median(live["secs"][case])
    cells = [case, f"{middle:.3f}", f"{live['bytes'] / 1e9 / middle:.2f}"]
    if case == reference:
        return [*cells, "", "", ""]
    part = share(live["secs"], case, reference)
    return [*cells, f"{part.middle:.3f}", f"{part.low:.3f} .. {part.high:.3f}", reference]


def share(secs: dict[str, list[float]], case: str, reference: str) -> Spread:
    """Return what part of another case's time a case took, within the same round."""
    return spread([own / other for own, other in zip(secs[case], secs[reference], strict=True)])


def judge_share(expectation: Share, secs: dict[str, list[float]]) -> Check:
    """Return what is expected, what was measured, and whether that holds."""
    found = share(secs, expectation.case, expectation.reference)
    unsure = ", within the noise" if found.low <= expectation.part < found.high else ""
    text = f"{expectation.case} takes <= {expectation.part:.2f} of {expectation.reference}, took {found}{unsure}"
    return Check(text, "held" if found.middle <= expectation.part else "missed", expectation.reason)


def times_faster(runs: Runs, case: str, reference: str) -> Spread:
    """Return how many times faster than another a case was, within the same round."""
    return spread([other["secs"] / own["secs"] for own, other in zip(runs[case], runs[reference], strict=True)])


def table_row(case: Case, runs: Runs) -> list[str]:
    """Return one case's cells under `HEADER`."""
    cells = [
        case.name,
        f"{middle(runs, case.name, 'secs'):.3f}",
        f"{middle(runs, case.name, 'cpu_secs'):.3f}",
        f"{middle(runs, case.name, 'extra_bytes') / 1e6:.0f}",
    ]
    if case.reference is None:
        return [*cells, "", "", ""]
    found = times_faster(runs, case.name, case.reference)
    return [*cells, f"{found.middle:.2f}", f"{found.low:.2f} .. {found.high:.2f}", case.reference]


def middle(runs: Runs, case: str, what: str) -> float:
    """Return the median over a case's rounds."""
    return float(statistics.median(run[what] for run in runs[case]))


def judge(expectation: Faster | Lean, runs: Runs) -> Check:
    """Return what is expected, what was measured, and whether that holds."""
    if isinstance(expectation, Lean):
        extra = max(run["extra_bytes"] for run in runs[expectation.case]) / 1e6
        text = f"{expectation.case} takes <= {expectation.megabytes:.0f} MB beside, took {extra:.0f} at most"
        return Check(text, "held" if extra <= expectation.megabytes else "missed")
    found = times_faster(runs, expectation.case, expectation.reference)
    unsure = ", within the noise" if found.low < expectation.times <= found.high else ""
    text = f"{expectation.case} >= {expectation.times:.1f} times faster than {expectation.reference}, was {found}"
    return Check(text + unsure, "held" if found.middle >= expectation.times else "missed")


def comparisons(runs: Runs, secs: dict[str, list[float]]) -> Iterator[Comparison]:
    """Yield how consolidation compares with torch_xla's, and live checkpoints with dcp's."""
    own, rival = runs["torchacc"], runs["torch_xla"]
    for what, key, scale, unit in (("seconds", "secs", 1.0, "s"), ("extra memory", "extra_bytes", 1e-6, "MB")):
        numbers = [[run[key] * scale for run in of_case] for of_case in (own, rival)]
        yield compare(f"{what} of consolidating rank files", "torch_xla", *numbers, unit)
    for case, reason in AGAINST_DCP.items():
        rival_case = case.replace("cold ", "cold dcp ") if case.startswith("cold") else f"dcp {case}"
        numbers = [secs[case], secs[rival_case]]
        yield compare(f"{case} of a live model", "torch.distributed.checkpoint", *numbers, "s", reason=reason)


def bars(runs: Runs, secs: dict[str, list[float]]) -> Iterator[Series]:
    """Yield the bars of both parts."""
    names = [case.name for case in CASES]
    for what, key, scale in (("s", "secs", 1.0), ("extra memory, MB", "extra_bytes", 1e-6)):
        yield Series(
            plot=f"Consolidating rank files: {what}",
            label=what,
            x=names,
            y=[middle(runs, name, key) * scale for name in names],
            x_label="",
            y_label=what,
        )
    for label, prefix in (("torchacc", ""), ("torch.distributed.checkpoint", "dcp "), ("plain files", "plain ")):
        load = "read" if label == "plain files" else "load"
        save = "write" if label == "plain files" else "save"
        yield Series(
            plot="Saving and loading a live model",
            label=label,
            x=["save", "load", "cold load"],
            y=[statistics.median(secs[name]) for name in (prefix + save, prefix + load, f"cold {prefix}{load}")],
            x_label="",
            y_label="s",
        )


def readings(runs: Runs, secs: dict[str, list[float]]) -> Iterator[str]:
    """Yield what the numbers say."""
    own, rival = (middle(runs, name, "extra_bytes") / 1e6 for name in ("torchacc", "torch_xla"))
    faster = times_faster(runs, "torchacc", "torch_xla").middle
    checked = times_faster(runs, "torchacc, verified", "torch_xla").middle
    yield (
        f"Consolidation is {faster:.1f} times faster than torch_xla's, in {own:.0f} MB beside what its process has "
        f"anyway, where torch_xla takes {rival:.0f}; with every checksum of the sources compared it is {checked:.1f} "
        "times faster."
    )
    parts = [share(secs, *pair).middle for pair in (("save", "plain write"), ("load", "plain read"))]
    cold = share(secs, "cold load", "cold plain read").middle
    again = share(secs, "reload", "plain reread").middle
    yield (
        f"Saving takes {parts[0]:.2f} times as long as plain files of the same bytes, checksums and the commit "
        f"included. Going on with a run takes {parts[1]:.2f} times as long as reading them, from the page cache, and "
        f"{cold:.2f} times from the disk; loading over what has been trained takes {again:.2f} times. Every byte is "
        "checked."
    )
    yield (
        f"An asynchronous save holds training up for {share(secs, 'async save', 'save').middle:.2f} of a save. The "
        "step beside which it copies its tensors takes, what it waits for included, "
        f"{share(secs, 'step beside', 'step').middle:.2f} times as long as others."
    )


if __name__ == "__main__":
    sys.exit(main())
