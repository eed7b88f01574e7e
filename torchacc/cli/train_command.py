"""Train a stage of a YAML file, on one machine or several: `torchacc train --stage stage1 --devices 4`."""

import argparse
from pathlib import Path

from torchacc.cli._options import add_job_options, named, path
from torchacc.train.run import Start, as_arguments, train
from torchacc.train.stage import StageRequest

EXAMPLES = (
    "torchacc train --config config.yaml --stage quickstart --devices 4",
    "torchacc train --config config.yaml --model-config model_config_small --precision bf16-mixed --dry-run",
)
_FOR_PROCESSES = ("mode", "config", "stage", "model_config", "fsdp_config", "devices", "num_nodes", "precision")
"""Options that the processes of a run get as they are."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--mode", choices=["production"], default="production", help="the only mode: train the stage")
    parser.add_argument(
        "--config", type=path, default=Path("config.yaml"), metavar="FILE", help="training file (default: config.yaml)"
    )
    parser.add_argument("--stage", type=named, metavar="NAME", help="name in training_stages (default: the first)")
    parser.add_argument(
        "--model-config", type=named, metavar="NAME", help="model_config_… section of the file (default: the stage's)"
    )
    parser.add_argument(
        "--fsdp-config",
        type=named,
        metavar="NAME",
        help="preset of distributed_examples that replaces the stage's distributed section",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="devices per machine; overrides the file")
    parser.add_argument(
        "--precision", type=named, metavar="NAME", help="32-true, bf16-mixed, bf16-true or 16-mixed; overrides the file"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would be done, and exit")
    parser.add_argument(
        "--overwrite", action="store_true", help="delete the existing run in the stage's folder, and start anew"
    )
    add_job_options(parser, num_nodes="as the file says", variables=True)


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit status."""
    request = StageRequest(
        stage=args.stage,
        model=args.model_config,
        preset=args.fsdp_config,
        num_nodes=args.num_nodes,
        devices=args.devices,
        precision=args.precision,
    )
    return train(
        args.config,
        request,
        Start(args.node_rank, args.master_addr, args.master_port, args.max_restarts, args.heartbeat_secs),
        as_arguments({name: getattr(args, name) for name in _FOR_PROCESSES}),
        dry_run=args.dry_run,
        overwrite=args.overwrite,
    )
