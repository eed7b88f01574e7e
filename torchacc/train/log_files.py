"""Set logging up for a stage: rank 0 logs to the terminal, and under `logging.debug` each process writes a file."""

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torchacc.errors import ConfigError, shown
from torchacc.logging import get_logger, make_console
from torchacc.train.config import LoggingConfig
from torchacc.train.run_folder import LOGS, RESERVED

_LIBRARIES = ("py.warnings", "transformers", "datasets", "huggingface_hub", "torch", "torch_xla", "absl")
_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OURS = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")
"""What a file of such lines begins with."""


def check_log_file(folder: Path, options: LoggingConfig) -> None:
    """Refuse a log file that cannot be written, or that is something else, which a log must not be added to.

    Args:
        folder: The stage's folder, which need not be there yet.
        options: They name the file.

    Raises:
        ConfigError: It names `logging.log_file`.
    """
    if options.log_file is None:
        return
    problem = _problem(folder.absolute(), options.log_file)
    if problem:
        raise ConfigError(f"logging.log_file = {shown(options.log_file)}: {problem}; name another, as 'training.log'")


def _problem(folder: Path, name: str) -> str | None:
    path = Path(os.path.normpath(_log_file(folder, name)))
    if path == folder or path.is_dir():
        return "it is a folder"
    if path.is_relative_to(folder):
        first = path.relative_to(folder).parts[0]
        if first in RESERVED or first.startswith("."):
            return "the run keeps something else there"
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if existing != path and not existing.is_dir():
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK):
        return f"{existing} cannot be written to"
    if path.is_file() and not _is_log(path):
        return "it is there, and no log"
    return None


def _is_log(path: Path) -> bool:
    """Return whether a file is empty, or begins with a line of a log of ours."""
    try:
        with path.open("rb") as file:
            begin = file.read(64)
    except OSError:
        return False
    return not begin or _OURS.match(begin) is not None


@contextmanager
def log_files(folder: Path, options: LoggingConfig, *, rank: int) -> Iterator[None]:
    """Context manager in which this process logs as one of a stage's does; afterwards logging is as it was.

    On the terminal rank 0 shows the package's lines and what libraries say; the other ranks show warnings of the
    package only, as a library says the same in each process. Files get both, and the traceback that ends the context.

    Args:
        folder: The stage's folder.
        options: Whether to log details, each rank to a file of its own, and the name of rank 0's file.
        rank: This process's rank.

    Raises:
        ConfigError: A file cannot be written, or is not a log.
    """
    if rank == 0:
        check_log_file(folder, options)
    files = [_open(path) for path in _paths(folder, options, rank)]
    package = get_logger("torchacc")
    consoles = package.handlers or [make_console(rank)]
    with ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        for console in consoles:
            stack.callback(console.setLevel, console.level)
            console.setLevel(max(console.level, logging.NOTSET if rank == 0 else logging.WARNING))
        level = logging.DEBUG if options.debug else logging.INFO
        stack.enter_context(_changed(package, [*consoles, *files], propagate=False, level=level))
        stack.enter_context(_libraries_in(files, speak=rank == 0))
        try:
            yield
        except BaseException:
            record = package.makeRecord(__name__, logging.ERROR, __file__, 0, "the stage ended:", (), sys.exc_info())
            for file in files:
                file.handle(record)
            raise


def _paths(folder: Path, options: LoggingConfig, rank: int) -> Iterator[Path]:
    if options.log_file is not None and rank == 0:
        yield _log_file(folder, options.log_file)
    if options.debug:
        yield folder / LOGS / f"rank-{rank:05d}.log"


def _log_file(folder: Path, name: str) -> Path:
    return folder / Path(name).expanduser()


def _open(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"logging: {path} cannot be written: {error}") from None
    handler.setFormatter(logging.Formatter(_LINE))
    return handler


@contextmanager
def _changed(
    logger: logging.Logger, handlers: Sequence[logging.Handler], *, propagate: bool, level: int | None = None
) -> Iterator[None]:
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = list(handlers), propagate
    if level is not None:
        logger.setLevel(level)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])


@contextmanager
def _libraries_in(files: Sequence[logging.Handler], *, speak: bool) -> Iterator[None]:
    """Add log files to libraries' loggers, and without `speak` remove all else; progress bars are for a terminal."""
    with ExitStack() as stack:
        if not speak or not sys.stderr.isatty():
            stack.enter_context(_no_progress_bars())
        logging.captureWarnings(True)
        stack.callback(logging.captureWarnings, False)
        for name in _LIBRARIES:
            logger = logging.getLogger(name)
            of_warnings = name == "py.warnings"  # it has no handler of its own
            own = [logging.StreamHandler()] if of_warnings else logger.handlers
            handlers = [*own, *files] if speak else files or [logging.NullHandler()]
            propagate = speak and logger.propagate and not of_warnings
            stack.enter_context(_changed(logger, handlers, propagate=propagate))
        yield


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets
    from transformers.utils import logging as of_transformers

    datasets.disable_progress_bars()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
        of_transformers.enable_progress_bar()
