"""The command `torchacc`. Each subcommand is a module here, imported only where it is the one that is asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from torchacc.errors import CheckpointError, ConfigError, DataError, EngineError

COMMANDS = {
    "env": "print versions and devices, and which engines can run here",
    "plan": "print what each device of a training needs in bytes, before there is any",
    "launch": "start the processes of a job, watch over them and end them together",
}
"""Subcommand -> what it does. Its module, of the same name, has `add_options(parser)` and `run(args)`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit status: 2 where the user has something to mend."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="torchacc", description="Train PyTorch models fully sharded.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name in arguments[:1]:
            module = importlib.import_module(f"torchacc.cli.{name}")
            module.add_options(command)
    args = parser.parse_args(arguments)
    try:
        status: int = module.run(args)
    except (CheckpointError, ConfigError, DataError, EngineError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return status
