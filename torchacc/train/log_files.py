"""Who logs what, and where: rank 0 speaks to the person, and under `logging.debug` each process writes a file."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torchacc.logging import get_logger, make_console
from torchacc.train.config import LoggingConfig
from torchacc.train.folder import LOGS

_LIBRARIES = ("py.warnings", "transformers", "datasets", "huggingface_hub", "torch", "torch_xla", "absl")
_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def log_files(folder: Path, options: LoggingConfig, *, rank: int) -> Iterator[None]:
    """Hold a context in which this process logs as one of a stage's does; afterwards logging is as it was.

    On the terminal rank 0 shows the package's lines and what libraries say; the other ranks show warnings of the
    package only, as a library says the same in each process. Files get both, and the traceback that ends the context.

    Args:
        folder: The stage's folder.
        options: Whether to log details, each rank to a file of its own, and the name of rank 0's file.
        rank: This process's rank.
    """
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
        yield folder / Path(options.log_file).expanduser()
    if options.debug:
        yield folder / LOGS / f"rank-{rank:05d}.log"


def _open(path: Path) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
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
    """Let libraries log to files as well, and without `speak` to nothing else; progress bars are for a terminal."""
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
