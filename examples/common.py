"""What the examples share: the choice of engine and devices, endless batches, and the report of rank 0."""

import argparse
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

import torchacc

# accelerate, which transformers imports, would start torch_xla before the engine and the devices are chosen.
os.environ.setdefault("USE_TORCH_XLA", "0")

Batch = TypeVar("Batch")


def make_parser(doc: str, *, steps: int, batch_size: int, lr: float, out: str) -> argparse.ArgumentParser:
    """Return a parser with the options of the tour; a batch is that of a step, which all devices share."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    add_device_options(parser)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="examples in a step, of all devices")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder to write to (default: %(default)s)")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, set the number of devices, and refuse what this launch cannot give."""
    args = parser.parse_args()
    choose_devices(parser, args)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: it starts at 1")
    if args.batch_size < 1 or args.batch_size % args.devices:
        parser.error(f"--batch-size {args.batch_size} does not divide by {args.devices} devices, which share it")
    return args


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `choose_devices()` reads."""
    parser.add_argument("--engine", choices=["auto", "xla", "native"], default="auto")
    parser.add_argument("--devices", type=int, help="default: one per process, or 4 XLA devices")


def choose_devices(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set --devices where it is left out; refuse a number that this launch cannot give."""
    no_xla = importlib.util.find_spec("torch_xla") is None
    native = args.engine == "native" or (args.engine == "auto" and (no_xla or torch.accelerator.is_available()))
    processes = torchacc.dist.world_size()
    one_each = processes > 1 or native  # else this one process drives as many XLA devices as it is asked to
    if args.devices is None:
        args.devices = processes if one_each else 4
    if args.devices < 1:
        parser.error("--devices starts at 1")
    if one_each and args.devices != processes:
        parser.error(
            f"--devices {args.devices} with {processes} process{'es' * (processes > 1)}, and each drives one device. "
            f"Leave --devices out, or launch with `torchrun --standalone --nproc_per_node={args.devices}`"
        )


def make_config(args: argparse.Namespace) -> torchacc.Config:
    """Return a config that shards over --devices: over processes, or all of them driven by this one."""
    config = torchacc.Config()
    config.backend = args.engine
    config.dist.fsdp.size = args.devices
    config.dist.fsdp.use_spmd = args.devices > torchacc.dist.world_size()
    return config


def cycle(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the loader's batches for ever, epoch after epoch."""
    while True:
        yield from loader


def is_master() -> bool:
    """Return whether this is the one process that reports and writes."""
    return torchacc.dist.is_master_ordinal(local=False)


def say(text: str) -> None:
    """Print a line, once for all processes."""
    if is_master():
        print(text, flush=True)


def write_metrics(out: Path, metrics: dict[str, Any]) -> None:
    """Write metrics.json, once for all processes."""
    if is_master():
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
