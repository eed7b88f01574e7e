"""The library's logger: silent until `accelerate()` runs; then rank 0 speaks, and others where they alone know."""

import logging
import sys

from torchacc.errors import printable

_ROOT = "torchacc"


OF_THIS_RANK = {"of_this_rank": True}
"""The `extra` of a warning that other ranks may not have, so that each shows its own. Others rank 0 shows for all."""

_SAID_OF_NOTHING = ("Defaulting to PJRT_DEVICE=CPU", "Skipping import of cpp extensions")
"""How lines begin that other libraries write while they are imported: torch_xla of the device that `accelerate()` will
choose, if something else imports it first; torchao, which transformers imports, of kernels that it does not need."""


def _tells_something(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_SAID_OF_NOTHING)


for _name in (None, "torchao"):
    logging.getLogger(_name).addFilter(_tells_something)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; `name` is the module's `__name__`."""
    return logging.getLogger(name)


def start_logging(rank: int) -> None:
    """Log from INFO on rank 0, and from WARNING on the others what concerns them alone, unless the user set logging up.

    Args:
        rank: This process's rank.
    """
    logger = logging.getLogger(_ROOT)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root = logging.getLogger()
    if logger.handlers or (root.handlers and not _are_of_torch_xla(root)):
        return
    logger.addHandler(make_console(rank))
    logger.propagate = False  # torch_xla gives the root logger a handler when it is imported


def _are_of_torch_xla(root: logging.Logger) -> bool:
    """Return whether logging was set up by torch_xla alone, which calls `logging.basicConfig()` when imported."""
    handler, *others = root.handlers
    has_defaults = type(handler) is logging.StreamHandler and root.level == logging.WARNING and not others
    form = handler.formatter._fmt if handler.formatter is not None else None
    return "torch_xla" in sys.modules and has_defaults and form == logging.BASIC_FORMAT


def _is_of_this_rank(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING or hasattr(record, "of_this_rank")


class _Formatter(logging.Formatter):
    """Shows names of files without what a terminal would obey."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name there
        return printable(super().formatMessage(record), "\n\t")


def make_console(rank: int) -> logging.Handler:
    """Return what shows the package's lines on the terminal; those of others than rank 0 begin with the rank."""
    handler = logging.StreamHandler()
    if rank:
        handler.addFilter(_is_of_this_rank)
    handler.setFormatter(_Formatter("torchacc: %(message)s" if rank == 0 else f"torchacc[{rank}]: %(message)s"))
    return handler
