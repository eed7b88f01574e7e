"""Write a page of the curves of one run or several: `torchacc report runs/a/stage1 runs/b/stage1`."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from torchacc.cli._options import path
from torchacc.config.text_file import read_json
from torchacc.errors import ConfigError
from torchacc.train.html_report import write_comparison
from torchacc.train.run_folder import RUN
from torchacc.train.run_reading import read_run

EXAMPLES = (
    "torchacc report runs/trainer/stage1 runs/trainer/stage2 --output both.html",
    "torchacc report runs/trainer/stage1 --plan plan.json",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("runs", type=path, nargs="+", metavar="RUN", help="folder of a run, which holds metrics.jsonl")
    parser.add_argument(
        "--output",
        type=path,
        default=Path("report.html"),
        metavar="FILE",
        help="HTML file to write, not in the folder of a run, which has its own (default: report.html)",
    )
    parser.add_argument(
        "--plan", type=path, metavar="FILE", help="output of `torchacc plan --json`, to plot beside the measured memory"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page, and return the exit status."""
    if (args.output.resolve().parent / RUN).exists():
        raise ConfigError(
            f"--output {args.output} lies in a run's folder, whose report.html is the run's own: name a file "
            "elsewhere, such as --output ../report.html"
        )
    folders = list(dict.fromkeys(folder.resolve() for folder in args.runs))
    runs = dict(zip(_names(folders), [read_run(folder) for folder in folders], strict=True))
    try:
        write_comparison(
            args.output,
            {name: found.rows for name, found in runs.items()},
            {name: found.outcome for name, found in runs.items()},
            {name: found.options for name, found in runs.items()},
            _planned(args.plan),
        )
    except OSError as error:
        raise ConfigError(f"--output {args.output} cannot be written: {error}; name another file") from None
    sys.stdout.write(f"wrote {args.output}\n")
    return 0


def _names(folders: list[Path]) -> list[str]:
    """Return what tells the folders apart: their paths below what they have in common."""
    if len(folders) == 1:
        return [f"{folders[0].parent.name}/{folders[0].name}"]
    common = os.path.commonpath(folders)
    return [folder.relative_to(common).as_posix() if folder != Path(common) else "." for folder in folders]


def _planned(path: Path | None) -> dict[str, int]:
    if path is None:
        return {}
    plan: Any = read_json(path)
    try:
        return {f"{name} on {plan['devices']}": int(needed["total"]) for name, needed in plan["strategies"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError(f"--plan {path} is not what `torchacc plan --json` prints: write that to it") from None
