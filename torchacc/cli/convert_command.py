"""Write a checkpoint in another format: `torchacc convert SRC DST --to dcp`."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

from torchacc.checkpoint.detect_format import format_of
from torchacc.checkpoint.other_formats.dcp_convert import export_dcp, import_dcp
from torchacc.checkpoint.other_formats.rank_conversion import Output, plan_consolidation, plan_conversion
from torchacc.checkpoint.own_format.unfinished import clear_unfinished
from torchacc.cli import _converting
from torchacc.cli._options import path, positive
from torchacc.errors import CheckpointError, printable

EXAMPLES = (
    "torchacc convert ckpt model --to hf --config-from gpt2",
    "torchacc convert runs/demo/stage1/final fsdp2 --to dcp",
    "torchacc convert fsdp2 model --to torchacc --config-from gpt2",
    "torchacc convert ckpt ckpt-8 --to rank-files --ranks 8",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("source", type=path, metavar="SRC", help="folder of the checkpoint; its format is detected")
    parser.add_argument("target", type=path, metavar="DST", help="file or folder to write; it must not exist")
    parser.add_argument(
        "--to", required=True, choices=dict.fromkeys(to for _, to in _CONVERSIONS), metavar="FORMAT",
        help="; ".join(f"{format} -> {', '.join(to)}" for format, to in _possible().items()),
    )  # fmt: skip
    parser.add_argument("--ranks", type=positive, metavar="N", help="number of ranks with --to rank-files, 2 or more")
    _converting.add_config_option(parser)
    _converting.add_work_options(parser)


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, and return the exit status."""
    format = format_of(args.source)
    convert = _CONVERSIONS.get((format, args.to))
    if convert is None:
        to = ", ".join(_possible().get(format, ())) or "nothing"
        raise CheckpointError(f"{args.source} is a {format} checkpoint, which can be made {to}, and not {args.to}")
    clear_unfinished(args.target)  # of a conversion that was killed there
    if args.target.is_file() or args.target.is_dir() and any(args.target.iterdir()):
        raise CheckpointError(f"{args.target} is there already: name another, or remove it first")
    if (args.ranks is not None) != (args.to == "rank-files"):
        raise CheckpointError("--ranks is for --to rank-files, which needs it: write --ranks 8")
    return convert(args)


def _to_one_file(args: argparse.Namespace, output: Output) -> int:
    output = replace(output, config_from=args.config_from)
    return _converting.run(args, plan_consolidation(str(args.source), "*.pth", str(args.target), output))


def _to_pth(args: argparse.Namespace) -> int:
    return _to_one_file(args, Output())


def _to_hf(args: argparse.Namespace) -> int:
    return _to_one_file(args, Output("safetensors"))


def _to_rank_files(args: argparse.Namespace) -> int:
    if args.ranks == 1:
        raise CheckpointError("--ranks 1: one rank has the whole model, write --to pth or --to hf")
    parts = _converting.PARTS["all"]
    return _converting.run(args, plan_conversion(args.source, parts, num_ranks=args.ranks, target=args.target))


def _to_dcp(args: argparse.Namespace) -> int:
    _refuse_work_options(args)
    with _converting.progress_bar() as progress:
        export_dcp(args.source, args.target, progress=progress)
    return _wrote(args)


def _from_dcp(args: argparse.Namespace) -> int:
    _refuse_work_options(args, config=True)
    with _converting.progress_bar() as progress:
        import_dcp(args.source, args.target, args.config_from, progress=progress)
    return _wrote(args)


def _refuse_work_options(args: argparse.Namespace, *, config: bool = False) -> None:
    given = {"--workers": args.workers, "--verify": args.verify, "--dry-run": args.dry_run}
    if not config:
        given["--config-from"] = args.config_from
    for option, value in given.items():
        if value:
            raise CheckpointError(f"{option} is for rank files, and means nothing here: leave it out")


def _wrote(args: argparse.Namespace) -> int:
    sys.stdout.write(printable(str(args.target)) + "\n")
    return 0


_CONVERSIONS: dict[tuple[str, str], Callable[[argparse.Namespace], int]] = {
    ("rank-files", "hf"): _to_hf,
    ("rank-files", "pth"): _to_pth,
    ("rank-files", "rank-files"): _to_rank_files,
    ("dcp", "torchacc"): _from_dcp,
    ("torchacc", "dcp"): _to_dcp,
    ("hf", "dcp"): _to_dcp,
}


def _possible() -> dict[str, list[str]]:
    """Return what each format can be made."""
    possible: dict[str, list[str]] = {}
    for format, to in _CONVERSIONS:
        possible.setdefault(format, []).append(to)
    return possible
