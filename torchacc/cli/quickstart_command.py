"""Write a first script and a first training file into an empty folder: `torchacc quickstart my-run`."""

import argparse
import shlex
import sys
from pathlib import Path

from torchacc.cli._options import path
from torchacc.errors import ConfigError

EXAMPLES = ("torchacc quickstart my-run", "torchacc quickstart")

_SOURCE = Path(__file__).with_name("quickstart_files")
_FILES = {"train.py": "train.py.txt", "config.yaml": "config.yaml"}
"""What is written -> the file of the package that it comes from; a script to copy is none of the package's modules."""
_NEXT = (
    ("python train.py", "a small Llama learns Python's own sources; the model is then in final/"),
    ("torchacc launch -n 2 train.py native", "the same, sharded over two processes"),
    ("torchacc train", "the same without a script, by config.yaml; with runs/quickstart/report.html"),
    ("torchacc env", "which engines can run here"),
)
"""Commands to run in the folder, and what each does."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "folder",
        type=path,
        nargs="?",
        default=Path(),
        metavar="FOLDER",
        help="folder to write to, empty or new (default: the current folder)",
    )


def run(args: argparse.Namespace) -> int:
    """Write the files, print what to run next, and return the exit status."""
    folder: Path = args.folder.expanduser()
    try:
        _check_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in _FILES.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write((_SOURCE / source).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"folder {folder} cannot be written: {error}; name another") from None
    sys.stdout.write(_said(folder))
    return 0


def _check_empty(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder that is empty or new")
    held = sorted(entry.name for entry in folder.iterdir())
    if held:
        raise ConfigError(
            f"folder {folder.resolve()} holds {held[0]}, and quickstart writes over nothing: name a folder that is "
            "empty or new, as in `torchacc quickstart my-run`"
        )


def _said(folder: Path) -> str:
    enter = [] if folder.resolve() == Path.cwd() else [(f"cd {shlex.quote(str(folder))}", "")]
    commands = [*enter, *_NEXT]
    width = max(len(command) for command, _ in commands)
    lines = [f"wrote {' and '.join(_FILES)}. Next:", ""]
    lines += [f"  {command:<{width}}  {f'# {does}' if does else ''}".rstrip() for command, does in commands]
    return "\n".join(lines) + "\n"
