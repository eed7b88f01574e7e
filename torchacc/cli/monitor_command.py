"""Show how a run goes, from its files alone: `torchacc monitor runs/trainer/stage1`."""

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from shutil import get_terminal_size

from torchacc.cli._options import path
from torchacc.errors import shown
from torchacc.train.metric_sinks import Row
from torchacc.train.run_folder import METRICS
from torchacc.train.run_reading import RunRead, memory_points, points, read_run

EXAMPLES = ("torchacc monitor runs/trainer/stage1", "torchacc monitor runs/trainer/stage1 --every 10")
_BARS = "▁▂▃▄▅▆▇█"
_VALUES = {
    "loss": ("loss", "{:.4f}"),
    "eval_loss": ("eval loss", "{:.4f}"),
    "grad_norm": ("gradient norm", "{:.3g}"),
    "lr": ("learning rate", "{:.2e}"),
    "tokens_per_sec": ("tokens/s", "{:,.0f}"),
    "mfu": ("MFU", "{:.1%}"),
    "data_wait": ("data wait", "{:.1%}"),
    "compile_secs": ("compiling, s", "{:.1f}"),
}
_NUM_EVENTS = 5
_RESTART_SECS = 60.0
"""How long a run that has ended, but not finished, writes nothing before nobody starts it again."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("folder", type=path, metavar="RUN", help="folder of a run, which holds metrics.jsonl")
    parser.add_argument(
        "--every", type=_secs, default=2.0, metavar="SECS", help="seconds between updates on a terminal (default: 2)"
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends and is not started again; once where nobody watches. Returns the exit status."""
    if not sys.stdout.isatty():
        sys.stdout.write(describe(args.folder, read_run(args.folder), width=100) + "\n")
        return 0
    while True:
        found = read_run(args.folder)
        text = describe(args.folder, found, width=get_terminal_size().columns)
        sys.stdout.write(f"\x1b[H\x1b[J{text}\n")  # from the upper left corner, on an empty screen
        sys.stdout.flush()
        if found.is_finished or (found.has_ended and _silent_secs(args.folder) > _RESTART_SECS):
            return 0
        time.sleep(args.every)


def describe(folder: Path, found: RunRead, *, width: int) -> str:
    """Return what a terminal shows of a run.

    Args:
        folder: The run's.
        found: What it holds.
        width: Columns of the terminal.
    """
    rows = found.rows
    step = max((row["step"] for row in rows), default=0)
    outcome = found.outcome.partition("\n")[0]
    lines = [str(folder), f"{outcome}{_silent_for(folder, found)}", _progress(found, step, width), ""]
    for name, (title, form) in _VALUES.items():
        values = [float(value) for value in points(rows, name)[1]]
        if values:
            lines.append(f"{title:<14} {form.format(values[-1]):>10}  {sparkline(values, max(width - 28, 8))}")
    for of, (_, peaks) in memory_points(rows).items():
        lines.append(f"{f'{of} memory':<14} {f'{max(peaks) / 2**30:.2f} GiB':>10}")
    events = [row for row in rows if "event" in row][-_NUM_EVENTS:]
    lines += (
        ["", *(f"step {row['step']}: {str(row['event']).partition(chr(10))[0]}" for row in events)] if events else []
    )
    return "\n".join(line[:width].rstrip() for line in lines)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values in a line of at most so many characters, each the mean of as many of them."""
    each = -(-len(values) // width)
    groups = [values[start : start + each] for start in range(0, len(values), each)]
    means = [sum(group) / len(group) for group in groups]
    low, high = min(means), max(means)
    if low == high:
        return _BARS[0] * len(means)
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def _progress(found: RunRead, step: int, width: int) -> str:
    total = found.options.get("training.max_steps")
    if not isinstance(total, int):
        return f"step {step:,}"
    full = min(width // 3, 40)
    done = min(step / total, 1.0)
    left = "" if found.has_ended else _left(found.rows, total - step)
    return f"step {step:,}/{total:,}  [{'#' * round(full * done):<{full}}] {done:.0%}{left}"


def _left(rows: Sequence[Row], steps: int) -> str:
    paces = points(rows, "secs_per_step")[1]
    return f"  about {timedelta(seconds=round(steps * paces[-1]))} left" if paces else ""


def _silent_for(folder: Path, found: RunRead) -> str:
    if found.has_ended:
        return ""
    return f", last wrote {timedelta(seconds=round(_silent_secs(folder)))} ago"


def _silent_secs(folder: Path) -> float:
    return max(time.time() - (folder / METRICS).stat().st_mtime, 0.0)


def _secs(text: str) -> float:
    try:
        secs = float(text)
    except ValueError:
        secs = 0.0
    if not 0.1 <= secs <= 3600:
        raise argparse.ArgumentTypeError(f"{shown(text)}: write seconds from 0.1 to 3600")
    return secs
