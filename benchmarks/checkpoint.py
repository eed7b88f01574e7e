"""Put rank files together, with torchacc and with torch_xla; save and load a live model, beside plain files and dcp.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --rounds 3 --folder /scratch

The files are those of torch_xla's FSDP on 4 ranks, with 400 MB of model and 800 MB of AdamW. Each run is a process of
its own, and the cases take turns. Memory is the peak that the system saw while the function ran, less what the process
had before. The files are in the page cache; torchacc's time includes that the result has reached the disk, torch_xla's
does not, and nothing of one run is left to be written in the next.

The second part saves and loads a model of that size with its AdamW, native on 4 ranks, in turns with plain file I/O of
the same bytes (each rank its own file, synced) and with torch.distributed.checkpoint (dcp). Each time is that of the
slowest rank. `load` finds its files in the page cache, `cold load` on the disk; `async save` is what the step waits
for.

Exits with 1 if a case fails or the results differ; what is slow or large is reported, not an error.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _checkpoint_cases import (
    CASES,
    EXPECTATIONS,
    LIVE_EXPECTATIONS,
    LIVE_RANKS,
    LIVE_REFERENCES,
    RANKS,
    Case,
    Faster,
    Lean,
    Share,
)
from _machine import OtherWork, checkout_environment, describe_other_work, machine_facts
from _markdown import render_table
from _results import Spread, spread
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
LIVE_HEADER = ("case", "s", "GB/s", "part", "quartiles", "of")
HEADER = ("case", "s", "CPU s", "extra memory MB", "times faster", "quartiles", "than")

Runs = dict[str, list[dict[str, Any]]]
"""What was measured of each case, by round."""


def main() -> int:
    """Run the cases and print the report."""
    args = parse_args()
    if args.worker:
        import _checkpoint_worker  # here, as the parent needs no torch

        _checkpoint_worker.run(args.worker, args.folder, args.target)
        return 0
    if args.make_files:
        import _checkpoint_worker

        _checkpoint_worker.make_files(args.folder)
        return 0
    with tempfile.TemporaryDirectory(prefix="checkpoint_", dir=args.folder) as name:
        folder = Path(name)
        call("--make-files", "--folder", name)
        runs = take_turns(folder, args.rounds)
        live = run_live(folder, args.rounds)
    agree = len({run["digest"] for of_case in runs.values() for run in of_case}) == 1
    sys.stdout.write(make_report(runs, agree, args.rounds))
    sys.stdout.write(make_live_report(live))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine_facts(), "runs": runs, "live": live}, indent=1) + "\n")
    return 0 if agree else 1


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="runs of each case (default: 10)")
    parser.add_argument("--folder", type=Path, help="where to write 2 GB for a while (default: for temporary files)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements there")
    parser.add_argument("--worker", choices=[case.name for case in CASES], help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make-files", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
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


def run_live(folder: Path, rounds: int) -> dict[str, Any]:
    """Run the second part: its bytes, and the seconds of each case by round."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={LIVE_RANKS}"]
    worker = str(Path(__file__).with_name("_checkpoint_live.py"))
    found: dict[str, Any] = json.loads(launch(*launcher, worker, "--folder", str(folder), "--rounds", str(rounds)))
    return found


def call(*arguments: str) -> str:
    """Run this file in a process of its own and return the last line that it prints."""
    return launch(__file__, *arguments)


def launch(*command: str) -> str:
    """Run Python in a process of its own and return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, *command], env=checkout_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip().rpartition("\n")[2]


def make_live_report(live: dict[str, Any]) -> str:
    """Return the second part's table, and below it what was expected."""
    secs: dict[str, list[float]] = live["secs"]
    gigabytes = live["bytes"] / 1e9
    rows = []
    for case, reference in LIVE_REFERENCES.items():
        middle = statistics.median(secs[case])
        cells = [case, f"{middle:.3f}", f"{gigabytes / middle:.2f}"]
        if case != reference:
            part = share(secs, case, reference)
            cells += [f"{part.middle:.3f}", f"{part.low:.3f} .. {part.high:.3f}", reference]
        rows.append(cells + [""] * (len(LIVE_HEADER) - len(cells)))
    lines = [
        "",
        f"{gigabytes:.1f} GB of model and AdamW, native on {LIVE_RANKS} ranks",
        "",
        render_table(LIVE_HEADER, rows),
        "",
        *(f"- {judge_share(expectation, secs)}" for expectation in LIVE_EXPECTATIONS),
    ]
    return "\n".join(lines) + "\n"


def share(secs: dict[str, list[float]], case: str, reference: str) -> Spread:
    """Return what part of another case's time a case took, within the same round."""
    return spread([own / other for own, other in zip(secs[case], secs[reference], strict=True)])


def judge_share(expectation: Share, secs: dict[str, list[float]]) -> str:
    """Return one line: what is expected, what was measured, and whether that holds."""
    found = share(secs, expectation.case, expectation.reference)
    verdict = "HELD" if found.middle <= expectation.part else "MISSED"
    unsure = found.low <= expectation.part < found.high
    line = f"{expectation.case} <= {expectation.part:.2f} of {expectation.reference}"
    return f"{line}: {found}, {verdict}{', within the noise' if unsure else ''}"


def times_faster(runs: Runs, case: str, reference: str) -> Spread:
    """Return how many times faster than another a case was, within the same round."""
    return spread([other["secs"] / own["secs"] for own, other in zip(runs[case], runs[reference], strict=True)])


def table_row(case: Case, runs: Runs) -> list[str]:
    """Return one case's cells under `HEADER`."""
    own = runs[case.name]
    secs, cpu, extra = (statistics.median(run[key] for run in own) for key in ("secs", "cpu_secs", "extra_bytes"))
    cells = [case.name, f"{secs:.3f}", f"{cpu:.3f}", f"{extra / 1e6:.0f}"]
    if case.reference is None:
        return [*cells, "", "", ""]
    low, middle, high = times_faster(runs, case.name, case.reference)
    return [*cells, f"{middle:.2f}", f"{low:.2f} .. {high:.2f}", case.reference]


def judge(expectation: Faster | Lean, runs: Runs) -> str:
    """Return one line: what is expected, what was measured, and whether that holds."""
    if isinstance(expectation, Lean):
        extra = max(run["extra_bytes"] for run in runs[expectation.case]) / 1e6
        verdict = "HELD" if extra <= expectation.megabytes else "MISSED"
        return f"{expectation.case} <= {expectation.megabytes:.0f} MB: {extra:.0f} at most, {verdict}"
    found = times_faster(runs, expectation.case, expectation.reference)
    verdict = "HELD" if found.middle >= expectation.times else "MISSED"
    unsure = found.low < expectation.times <= found.high
    line = f"{expectation.case} >= {expectation.times:.1f} times faster than {expectation.reference}"
    return f"{line}: {found}, {verdict}{', within the noise' if unsure else ''}"


def make_report(runs: Runs, agree: bool, rounds: int) -> str:
    """Return the table, and below it what was expected, and how far the timings can be trusted."""
    facts = machine_facts()
    measured = [run.get("other_cores") for of_case in runs.values() for run in of_case]
    others = [cores for cores in measured if cores is not None]
    lines: Sequence[str] = [
        f"400 MB of model and 800 MB of AdamW in {RANKS} rank files; {rounds} rounds on {facts['cores']} cores; "
        f"torch {facts['torch']}, torch_xla {facts['torch_xla']}",
        "",
        render_table(HEADER, [table_row(case, runs) for case in CASES]),
        "",
        "- the results agree, bit for bit" if agree else "- WRONG: THE RESULTS DIFFER",
        *(f"- {judge(expectation, runs)}" for expectation in EXPECTATIONS),
        *([f"- {describe_other_work(others)}"] if others else []),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
