"""Put the model in rank files together: `consolidate_sharded_model_checkpoints --ckpt_prefix DIR`."""

import argparse
import sys
from collections.abc import Sequence

from torchacc.checkpoint.other_formats.conversion import ConversionPlan
from torchacc.checkpoint.other_formats.rank_conversion import plan_consolidation
from torchacc.cli import _converting
from torchacc.cli._errors import exit_status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="consolidate_sharded_model_checkpoints",
        description="Put the model in the rank files of torchacc, or of torch_xla's FSDP, together. Needs no device.",
    )
    parser.add_argument("--ckpt_prefix", required=True, help="a folder, or what the paths of the rank files begin with")
    parser.add_argument("--ckpt_suffix", default="*.pth", help="what they end with, as a pattern (default: *.pth)")
    parser.add_argument(
        "--save_path",
        default="",
        help="the file to write, or the folder with --format safetensors "
        "(default: consolidated.pth in the folder, or <prefix>_consolidated.pth; without .pth if it is a folder)",
    )
    _converting.add_options(parser)
    args = parser.parse_args(arguments)
    return exit_status(lambda: _converting.run(args, _plan(args)))


def _plan(args: argparse.Namespace) -> ConversionPlan:
    return plan_consolidation(args.ckpt_prefix, args.ckpt_suffix, args.save_path, _converting.output(args))


if __name__ == "__main__":
    sys.exit(main())
