"""Put a model that is saved in parts together: `torchacc consolidate ckpt --output model.pth`."""

import argparse

from torchacc.checkpoint.detect_format import format_of
from torchacc.checkpoint.other_formats.rank_conversion import plan_consolidation
from torchacc.cli import _converting
from torchacc.cli._options import named, path
from torchacc.errors import CheckpointError

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
    format = format_of(args.folder)
    if format == "dcp":
        raise CheckpointError(
            f"{args.folder} is a folder of torch.distributed.checkpoint: `torchacc convert {args.folder} NEW --to "
            "torchacc` puts it together"
        )
    if format != "rank-files":
        raise CheckpointError(
            f"{args.folder} is whole already: from_pretrained() and torchacc.checkpoint.load() open it, and "
            f"`torchacc convert {args.folder} NEW --to dcp` writes it in another format"
        )
    plan = plan_consolidation(str(args.folder), "*.pth", args.output or "", _converting.output(args))
    return _converting.run(args, plan)
