"""Hear what the package logs, also where pytest is not there."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heard(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Context manager with the messages that are logged in it, from a level on."""
    messages: list[str] = []
    listener = logging.Handler(level)
    listener.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchacc").addHandler(listener)
    try:
        yield messages
    finally:
        logging.getLogger("torchacc").removeHandler(listener)
