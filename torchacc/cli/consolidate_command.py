"""Put a model that is saved in parts together: `torchacc consolidate ckpt --output model.pth`."""

import argparse

from torchacc.checkpoint.detect_format import check_rank_files
from torchacc.checkpoint.other_formats.rank_conversion import plan_consolidation
from torchacc.cli import _converting
from torchacc.cli._options import named, path

EXAMPLES = (
    "torchacc consolidate ckpt",
    "torchacc consolidate ckpt --output model --format safetensors --dtype bfloat16 --config-from gpt2",
    "torchacc consolidate ckpt --dry-run",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("folder", type=path, metavar="DIR", help="folder of the rank files")
    parser.add_argument(
        "--output", type=named, metavar="PATH",
        help="file to write, or folder with --format safetensors (default: consolidated.pth, or consolidated, in DIR)",
    )  # fmt: skip
    _converting.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Write the whole model, and return the exit status."""
    check_rank_files(args.folder)
    plan = plan_consolidation(str(args.folder), "*.pth", args.output or "", _converting.output(args))
    return _converting.run(args, plan)
