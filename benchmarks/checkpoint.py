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
trained; states go into new memory there, too, as what `optimizer.state_dict()` gave before keeps the old. The
`plain reread` goes into memory that is all in use. `async save` is what training waits for: until the save has
returned, which copies all of it, into the memory of the save before; the first of a run has to be given that memory.

Exits with 1 if a case fails or the results differ; what is slow or large is reported, not an error.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _checkpoint_cases import (
    AGAINST_DCP,
    CASES,
    EXPECTATION,
    EXTRA_MB,
    LIVE_EXPECTATIONS,
    LIVE_RANKS,
    LIVE_REFERENCES,
    RANKS,
    UNITS,
    Case,
)
from _machine import in_turns, median_cores, run_alone
from _markdown import count
from _report import ratio_cells
from _results import Check, Comparison, Report, Series, Table, compare, emit, spread
from _teams import progress, read_command_line

LIVE_HEADER = ["case", "s", "GB/s", "ratio", "quartiles", "to"]
HEADER = ["case", "s", "CPU s", "extra memory MB", "ratio", "quartiles", "to"]
QUICK_UNITS = 2

Runs = dict[str, list[dict[str, Any]]]
"""What was measured of each case, by round."""
Secs = dict[str, list[float]]
"""Of each case, by round."""
Live = dict[str, Any]
"""What was measured of the second part: its `bytes`, and the `secs` of each case by round."""


def main() -> int:
    """Run the cases and print the report."""
    args = read_command_line(__doc__, CASES, [case.name for case in CASES], rounds=6, add=add_options)
    if args.worker:
        import _checkpoint_worker  # here, as the parent needs no torch

        if args.worker == "prepare":
            _checkpoint_worker.make_files(args.folder, args.units)
        else:
            _checkpoint_worker.run(args.worker.name, args.folder, args.target)
        return 0
    units = QUICK_UNITS if args.quick else args.units
    with tempfile.TemporaryDirectory(prefix="checkpoint_", dir=args.folder) as name:
        run_alone([__file__, "--worker", "prepare", "--folder", name, "--units", str(units)])
        runs = consolidate(Path(name), args.rounds)
        live = save_and_load(Path(name), args.rounds, units)
    agree = len({run["digest"] for of_case in runs.values() for run in of_case}) == 1
    emit(make_report(runs, live, agree), args.json)
    return 0 if agree else 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add where files go, and what the processes are told."""
    parser.add_argument("--folder", type=Path, help="where to write 5 GB for a while (default: for temporary files)")
    parser.add_argument("--units", type=int, default=UNITS, help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)


def consolidate(folder: Path, rounds: int) -> Runs:
    """Run each case once in each round."""
    runs: Runs = {case.name: [] for case in CASES}
    for case in progress(in_turns(CASES, rounds), "runs"):
        target = folder / "out.pth"
        os.sync()
        arguments = ["--worker", case.name, "--folder", str(folder), "--target", str(target)]
        runs[case.name].append(run_alone([__file__, *arguments]))
        target.unlink()
    return runs


def save_and_load(folder: Path, rounds: int, units: int) -> Live:
    """Run the second part."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={LIVE_RANKS}"]
    worker = str(Path(__file__).with_name("_checkpoint_live.py"))
    return run_alone([*launcher, worker, "--folder", str(folder), "--rounds", str(rounds), "--units", str(units)])


def make_report(runs: Runs, live: Live, agree: bool) -> Report:
    """Return all that was measured, and whether it is what was expected."""
    secs, gigabytes = live["secs"], live["bytes"] / 1e9
    extra = max(run["extra_bytes"] for run in runs["torchacc"]) / 1e6
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
                "that have been trained; states go into new memory there, too, as what `optimizer.state_dict()` gave "
                "before keeps the old. `plain reread` goes into memory that is all in use. `async save` is what "
                "training waits for: until the save returns, which copies all of it, into the memory of the save "
                "before; the `first` one of a run has to be given that memory.",
            ),
        ],
        checks=[
            Check("the results of consolidation agree, bit for bit", "held" if agree else "missed"),
            EXPECTATION.judge("time of consolidation", ratios(seconds(runs), EXPECTATION.case, EXPECTATION.reference)),
            Check.of(f"torchacc takes <= {EXTRA_MB:.0f} MB beside, took {extra:.0f} at most", extra <= EXTRA_MB),
            *(limit.judge("time", ratios(secs, limit.case, limit.reference)) for limit in LIVE_EXPECTATIONS),
        ],
        comparisons=list(comparisons(runs, secs)),
        series=list(bars(runs, secs)),
        reading=list(readings(runs, secs)),
    )


def live_row(case: str, reference: str, live: Live) -> list[str]:
    """Return one live case's cells under `LIVE_HEADER`."""
    middle = statistics.median(live["secs"][case])
    cells = [case, f"{middle:.3f}", f"{live['bytes'] / 1e9 / middle:.2f}"]
    return [*cells, *ratio_cells([] if case == reference else ratios(live["secs"], case, reference), reference)]


def ratios(secs: Secs, case: str, reference: str) -> list[float]:
    """Return what part of another case's time a case took, within the same round."""
    return [own / other for own, other in zip(secs[case], secs[reference], strict=True)]


def share(secs: Secs, case: str, reference: str) -> float:
    """Return the median of what part of another case's time a case took."""
    return spread(ratios(secs, case, reference)).middle


def seconds(runs: Runs) -> Secs:
    """Return the seconds of each case of consolidation, by round."""
    return {name: [run["secs"] for run in of_case] for name, of_case in runs.items()}


def table_row(case: Case, runs: Runs) -> list[str]:
    """Return one case's cells under `HEADER`."""
    cells = [
        case.name,
        f"{middle(runs, case.name, 'secs'):.3f}",
        f"{middle(runs, case.name, 'cpu_secs'):.3f}",
        f"{middle(runs, case.name, 'extra_bytes') / 1e6:.0f}",
    ]
    found = ratios(seconds(runs), case.name, case.reference) if case.reference else []
    return [*cells, *ratio_cells(found, case.reference or "")]


def middle(runs: Runs, case: str, what: str) -> float:
    """Return the median over a case's rounds."""
    return float(statistics.median(run[what] for run in runs[case]))


def comparisons(runs: Runs, secs: Secs) -> Iterator[Comparison]:
    """Yield how consolidation compares with torch_xla's, and live checkpoints with dcp's."""
    own, rival = runs["torchacc"], runs["torch_xla"]
    for what, key, scale, unit in (("seconds", "secs", 1.0, "s"), ("extra memory", "extra_bytes", 1e-6, "MB")):
        numbers = [[run[key] * scale for run in of_case] for of_case in (own, rival)]
        yield compare(f"{what} of consolidating rank files", "torch_xla", *numbers, unit)
    for case, reason in AGAINST_DCP.items():
        rival_case = case.replace("cold ", "cold dcp ") if case.startswith("cold") else f"dcp {case}"
        numbers = [secs[case], secs[rival_case]]
        yield compare(f"{case} of a live model", "torch.distributed.checkpoint", *numbers, "s", reason=reason)


def bars(runs: Runs, secs: Secs) -> Iterator[Series]:
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


def readings(runs: Runs, secs: Secs) -> Iterator[str]:
    """Yield what the numbers say."""
    own, rival = (middle(runs, name, "extra_bytes") / 1e6 for name in ("torchacc", "torch_xla"))
    part, checked = (share(seconds(runs), name, "torch_xla") for name in ("torchacc", "torchacc, verified"))
    yield (
        f"Consolidation takes {part:.2f} of torch_xla's time, in {own:.0f} MB beside what its process has anyway, "
        f"where torch_xla takes {rival:.0f}; with every checksum of the sources compared it takes {checked:.2f}."
    )
    parts = [share(secs, *pair) for pair in (("save", "plain write"), ("load", "plain read"))]
    cold = share(secs, "cold load", "cold plain read")
    again = share(secs, "reload", "plain read")
    yield (
        f"Saving takes {parts[0]:.2f} times as long as plain files of the same bytes, checksums and the commit "
        f"included. Going on with a run takes {parts[1]:.2f} times as long as reading them, from the page cache, and "
        f"{cold:.2f} times from the disk; loading over what has been trained takes {again:.2f} times. Every byte is "
        "checked."
    )
    yield (
        f"An asynchronous save holds training up for {share(secs, 'async save', 'save'):.2f} of a save, the first one "
        f"of a run for {share(secs, 'first async save', 'save'):.2f}."
    )


if __name__ == "__main__":
    sys.exit(main())
