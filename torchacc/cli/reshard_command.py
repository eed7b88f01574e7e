"""Make rank files for another number of ranks: `torchacc reshard ckpt --ranks 8 --output ckpt-8`."""

import argparse

from torchacc.checkpoint.detect_format import check_rank_files
from torchacc.checkpoint.other_formats.rank_conversion import plan_conversion
from torchacc.cli import _converting
from torchacc.cli._options import path, positive
from torchacc.errors import CheckpointError

EXAMPLES = (
    "torchacc reshard ckpt --ranks 8 --output ckpt-8",
    "torchacc reshard ckpt --ranks 2 --output ckpt-2 --part model --verify",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("folder", type=path, metavar="DIR", help="folder of the rank files")
    parser.add_argument(
        "--ranks", type=positive, required=True, metavar="N", help="number of ranks to write for, 2 or more"
    )
    parser.add_argument("--output", type=path, metavar="DIR", help="folder to write to (default: DIR)")
    parser.add_argument("--part", choices=_converting.PARTS, default="all", help="what to write (default: all)")
    _converting.add_work_options(parser)


def run(args: argparse.Namespace) -> int:
    """Write the rank files, and return the exit status."""
    check_rank_files(args.folder)
    if args.ranks == 1:
        raise CheckpointError(f"--ranks 1: for one rank there is `torchacc consolidate {args.folder}`")
    parts = _converting.PARTS[args.part]
    return _converting.run(args, plan_conversion(args.folder, parts, num_ranks=args.ranks, target=args.output))
