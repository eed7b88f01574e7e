"""The library's logger: silent until `accelerate()` runs, and then spoken by rank 0 only."""

import logging

_ROOT = "torchacc"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; `name` is the module's `__name__`."""
    return logging.getLogger(name)


def start_logging(rank: int) -> None:
    """Let rank 0 report from INFO on and the other ranks from WARNING on, unless the user has set logging up.

    Args:
        rank: This process's rank.
    """
    logger = logging.getLogger(_ROOT)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    if logger.hasHandlers():
        return
    logger.addHandler(make_console(rank))
    logger.propagate = False  # torch_xla gives the root logger a handler when it is imported


def make_console(rank: int) -> logging.Handler:
    """Return what shows the package's lines on the terminal; those of others than rank 0 begin with the rank."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("torchacc: %(message)s" if rank == 0 else f"torchacc[{rank}]: %(message)s"))
    return handler
