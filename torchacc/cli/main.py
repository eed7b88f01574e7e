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
    "quickstart": "write a first script and a first training file into an empty folder",
    "env": "print what a bug report needs: versions, devices, and which engines can run here",
    "plan": "print what each device of a training needs in bytes, before there is any",
    "train": "train a stage of a YAML file, on one machine or several",
    "report": "write a page of the curves of one run or several",
    "monitor": "show how a run goes, as long as it goes",
    "launch": "start the processes of a job, watch over them and end them together",
    "consolidate": "put a model together that many processes have saved in parts",
    "reshard": "make rank files for another number of ranks",
    "convert": "write a checkpoint in another format",
}
"""Subcommand -> what it does. Its module is `command_module(name)`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit status: 2 where the user has something to mend."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="torchacc",
        description="Train PyTorch models fully sharded.",
        epilog="`torchacc COMMAND --help` tells more of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"torchacc {_version()}")
    parser.add_argument(
        "--traceback", action="store_true", help="let errors end with a traceback; TORCHACC_TRACEBACK=1 does the same"
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
