"""Consolidate rank files, or reshard them: `consolidate_and_reshard_fsdp_ckpts --ckpt_dir DIR --reshard_num 8`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchacc.checkpoint.other_formats.conversion import ConversionPlan
from torchacc.checkpoint.other_formats.rank_conversion import plan_conversion
from torchacc.cli import _converting
from torchacc.cli._errors import exit_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    args = _parse(arguments)
    return exit_status(lambda: _converting.run(args, _plan(args)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="consolidate_and_reshard_fsdp_ckpts",
        description="Put the model and the optimizer in the rank files of torchacc, or of torch_xla's FSDP, together, "
        "or make rank files for another number of ranks. Needs no device.",
    )
    parser.add_argument("--ckpt_dir", type=Path, required=True, help="the folder with the rank files")
    parser.add_argument("--ckpt_type", choices=_converting.PARTS, default="all", help="what to convert (default: all)")
    parser.add_argument("--reshard_num", type=int, default=1, help="ranks to write for; 1 consolidates (default: 1)")
    parser.add_argument("--save_dir", type=Path, help="the folder to write into (default: the same)")
    for part in _converting.PARTS["all"]:
        parser.add_argument(
            f"--{part}_ckpt_name_pattern",
            metavar="PATTERN",
            help=f"the {part}'s rank files (default: rank-*-of-*-{part}.pth, or else rank-*-of-*.pth)",
        )
        parser.add_argument(
            f"--{part}_save_name_pattern",
            metavar="PATTERN",
            help=f"what to write (default: {part}_consolidated.pth, or rank-*-of-*-{part}.pth)",
        )
    _converting.add_options(parser)
    return parser.parse_args(arguments)


def _plan(args: argparse.Namespace) -> ConversionPlan:
    return plan_conversion(
        args.ckpt_dir,
        _converting.PARTS[args.ckpt_type],
        num_ranks=args.reshard_num,
        target=args.save_dir,
        patterns={"model": args.model_ckpt_name_pattern, "optimizer": args.optimizer_ckpt_name_pattern},
        names={"model": args.model_save_name_pattern, "optimizer": args.optimizer_save_name_pattern},
        output=_converting.output(args),
    )


if __name__ == "__main__":
    sys.exit(main())
