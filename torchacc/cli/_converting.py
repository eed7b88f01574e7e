"""What the commands that convert checkpoints have in common."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tqdm import tqdm

from torchacc.checkpoint.other_formats.conversion import ConversionPlan, execute
from torchacc.checkpoint.other_formats.rank_conversion import Output
from torchacc.checkpoint.other_formats.rank_files import Part
from torchacc.cli._options import path, positive, size
from torchacc.errors import CheckpointError, printable

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PARTS: dict[str, tuple[Part, ...]] = {
    "all": ("model", "optimizer"),
    "model": ("model",),
    "optimizer": ("optimizer",),
}
"""What of rank files can be converted, by the names of the options."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of what is written, and of how."""
    add_output_options(parser)
    add_work_options(parser)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a consolidated model."""
    parser.add_argument(
        "--format",
        choices=("pth", "safetensors"),
        default="pth",
        help="format of the model: one .pth file, or a folder for from_pretrained() (default: pth)",
    )
    parser.add_argument(
        "--max-shard-size", type=size, metavar="SIZE", help="maximum size of each safetensors file, such as 5GB"
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="cast floating-point tensors of the model to this dtype")
    add_config_option(parser)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of what lies beside a model's tensors."""
    parser.add_argument(
        "--config-from",
        type=path,
        metavar="DIR",
        help="folder to copy config.json and the tokenizer from (default: that of the rank files)",
    )


def add_work_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of how files are copied."""
    parser.add_argument("--workers", type=positive, help="number of threads (default: one per core, up to 8)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="verify all checksums of the input, including data that is not copied, and read the output back",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, without writing")


def output(args: argparse.Namespace) -> Output:
    """Return how a consolidated model is to be written."""
    if args.max_shard_size is not None and args.format != "safetensors":
        raise CheckpointError("--max-shard-size is for --format safetensors: a .pth file is not split")
    return Output(args.format, args.max_shard_size, _DTYPES[args.dtype] if args.dtype else None, args.config_from)


def run(args: argparse.Namespace, plan: ConversionPlan) -> int:
    """Carry out a plan, or print it; return the exit status."""
    if args.dry_run:
        sys.stdout.write(printable(plan.describe(), "\n") + "\n")
        return 0
    _execute(plan, args)
    for file in plan.files:
        sys.stdout.write(printable(str(file.path)) + "\n")
    return 0


def _execute(plan: ConversionPlan, args: argparse.Namespace) -> None:
    with progress_bar(plan.work(verify=args.verify)) as progress:
        execute(plan, workers=args.workers, verify=args.verify, progress=progress)


@contextmanager
def progress_bar(total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar of bytes while the context is entered, and yield the function that takes the bytes that are done.

    Args:
        total: The bytes of all; None where the function gets them with each call, as a second number.
    """
    with tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, file=sys.stderr) as bar:

        def progress(count: int, total: int | None = total) -> None:
            with bar.get_lock():
                bar.total = total
                bar.update(count)

        yield progress
