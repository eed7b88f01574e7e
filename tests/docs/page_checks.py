"""What is checked of blocks that are not run: their syntax, and that what they name of ours is there."""

import argparse
import ast
import importlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import yaml
from pages import ROOT, Block, diff_side
from torch.distributed.run import get_args_parser

import torchacc
from torchacc.cli.main import COMMANDS, command_module


class CheckError(Exception):
    """A block that is not run could not run anywhere."""


def check(block: Block) -> None:
    """Check a block.

    Raises:
        CheckError: It is not in its language, or names what does not exist.
    """
    checks = {"python": _check_python, "diff": _check_diff, "bash": _check_bash}
    if block.language in checks:
        checks[block.language](block)
    elif block.language == "yaml":
        list(yaml.safe_load_all(block.text))
    elif block.language == "json":
        json.loads(block.text)


def _check_diff(block: Block) -> None:
    _parse(diff_side(block.text, "-"), block)
    _check_python(block)


def _check_python(block: Block) -> None:
    tree = _parse(block.code, block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchacc":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute):
            _check_name(ast.unparse(node), block)


def _check_name(name: str, block: Block) -> None:
    """Check a dotted name that begins with the package, or with a config."""
    beginnings = {"torchacc": torchacc, "config": torchacc.Config()}
    first, *rest = name.split(".")
    if first in beginnings and all(part.isidentifier() for part in rest):
        try:
            reduce(getattr, rest, beginnings[first])
        except AttributeError as error:
            raise CheckError(f"{block}: {name}: {error}") from None


def _parse(code: str, block: Block) -> ast.Module:
    try:
        return ast.parse(code)
    except SyntaxError as error:
        raise CheckError(f"{block}: {error}") from None


def _check_bash(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    if done.returncode:
        raise CheckError(f"{block}: {done.stderr}")
    for command in commands(block.text):
        try:
            _check_command(command)
        except (SystemExit, CheckError, argparse.ArgumentError) as error:
            raise CheckError(f"{block}: {shlex.join(command)}: {error}") from None


def commands(script: str) -> Iterator[list[str]]:
    """Yield the commands of a script, without variables set before them and without comments."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word.strip("();<>|&"):
                if command or not re.fullmatch(r"[A-Za-z_]\w*=.*", word, re.DOTALL):
                    command.append(word)
                continue
            if command:
                yield command
            command = []


def _check_command(command: list[str]) -> None:
    program, arguments = Path(command[0]).name, command[1:]
    if program in {"srun", "exec"}:
        start = next((i for i, word in enumerate(arguments) if word in _CHECKED), None)
        if start is not None:
            _check_command(arguments[start:])
    elif program in _CHECKED:
        _CHECKED[program](arguments)


def _check_torchrun(arguments: list[str]) -> None:
    parser = get_args_parser()
    parser.exit_on_error = False
    # A variable stands for a number where a number is expected.
    arguments = ["1" if word.startswith("$") else re.sub(r"=\"?\$.*", "=1", word) for word in arguments]
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise CheckError(f"torchrun knows no {unknown}")
    _check_python_command([*(["-m"] if options.module else []), options.training_script, *options.training_script_args])


def _check_torchacc(arguments: list[str]) -> None:
    if arguments[0].startswith("-"):
        return
    if arguments[0] not in COMMANDS:
        raise CheckError(f"torchacc has no command {arguments[0]!r}")
    module = command_module(arguments[0])
    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_options(parser)
    options = parser.parse_args(["1" if word.startswith("$") else word for word in arguments[1:]])
    if arguments[0] == "launch":
        _check_python_command([*(["-m"] if options.module else []), *options.program])


def _check_python_command(arguments: list[str]) -> None:
    if arguments[0] == "-m" and arguments[1] == "torchacc.train":
        _check_torchacc(["train", *arguments[2:]])
    elif arguments[0] == "-m" and arguments[1] == "torchacc":
        _check_torchacc(arguments[2:])
    elif arguments[0].startswith(("examples/", "benchmarks/")):
        _check_script(ROOT / arguments[0], arguments[1:])


def _check_script(script: Path, arguments: list[str]) -> None:
    if not script.is_file():
        raise CheckError(f"there is no {script.relative_to(ROOT)}")
    of_train = (ROOT / "torchacc" / "cli" / name for name in ("train_command.py", "_options.py"))
    neighbours = [script, *of_train, *script.parent.glob("_*.py")]
    known = "".join(path.read_text(encoding="utf-8") for path in neighbours)
    for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        if f'"{option}"' not in known:
            raise CheckError(f"{script.relative_to(ROOT)} has no option {option}")


def _check_pip(arguments: list[str]) -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for extras in re.findall(r"(?:^|torchacc|\.)\[([\w,-]+)\]", " ".join(arguments)):
        for extra in extras.split(","):
            if f'"{extra}": ' not in setup:
                raise CheckError(f"there is no extra {extra!r}")


_CHECKED = {
    "torchrun": _check_torchrun,
    "torchacc": _check_torchacc,
    "python": _check_python_command,
    "python3": _check_python_command,
    "pip": _check_pip,
}
