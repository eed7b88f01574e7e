"""The command `torchacc`. Each subcommand is a module here, imported only where it is the one that is asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torchacc.cli._errors import exit_status
from torchacc.config.names import did_you_mean, nearest
from torchacc.env import installed_version

COMMANDS = {
    "quickstart": "create a starter script and training file in an empty folder",
    "env": "print versions, devices and available engines, for a bug report",
    "plan": "estimate the memory of training on each device, or search for a layout",
    "train": "train a stage of a YAML training file, on one or several machines",
    "report": "write an HTML report with the curves of one or more runs",
    "monitor": "show the progress of a run until it ends",
    "launch": "launch and supervise the processes of a job",
    "consolidate": "consolidate rank files into one model checkpoint",
    "reshard": "reshard rank files for another number of ranks",
    "convert": "convert a checkpoint to another format",
}
"""Subcommand -> what it does. Its module is `command_module(name)`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit status: 2 where the user has something to mend."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="torchacc",
        description="Train PyTorch models fully sharded.",
        epilog="Run `torchacc COMMAND --help` for the options of a command, and examples.",
    )
    parser.add_argument("--version", action="version", version=f"torchacc {_version()}")
    parser.add_argument(
        "--traceback", action="store_true", help="print the traceback of errors, as TORCHACC_TRACEBACK=1 does"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    if asked is not None and asked not in COMMANDS:
        parser.error(f"there is no command {asked!r}; {nearest(asked, COMMANDS)}")
    for name, purpose in COMMANDS.items():
        says = f"{purpose[0].upper()}{purpose[1:]}."
        command = commands.add_parser(name, help=purpose, description=says, allow_abbrev=False)
        if name == asked:
            module, chosen = _load(name, command), command
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(chosen, unknown[0])
    return exit_status(lambda: int(module.run(args)), traceback=args.traceback)


def command_module(name: str) -> Any:
    """Import a subcommand: a module with `add_options(parser)`, `run(args)` and `EXAMPLES`."""
    return importlib.import_module(f"torchacc.cli.{name}_command")


def _load(name: str, command: argparse.ArgumentParser) -> Any:
    """Import a subcommand, and give its parser its options and examples."""
    module = command_module(name)
    module.add_options(command)
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = "\n  ".join(["examples:", *module.EXAMPLES])
    return module


def _refuse(command: argparse.ArgumentParser, unknown: str) -> NoReturn:
    """End with what a command does not know, and the nearest of its options."""
    option = unknown.partition("=")[0]
    hint = did_you_mean(option, command._option_string_actions) or f"`{command.prog} --help` lists what there is"
    command.error(f"there is no {'option' if option.startswith('-') else 'argument'} {option!r}; {hint}")


def _version() -> str:
    return installed_version("torchacc") or "from a checkout"
