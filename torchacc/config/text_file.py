"""Read small text files of users or other processes completely, or refuse them with the reason."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from torchacc.errors import ConfigError, in_one_line

MAX_BYTES = 1 << 20
"""Of a file of options: a hundred times of what the largest needs."""


def read_text(path: str | Path, max_bytes: int = MAX_BYTES) -> str:
    """Return a file's text, without a byte order mark.

    Raises:
        ConfigError: There is no such file, it is a folder, a pipe or a device, it is larger than that, or it is not
            UTF-8; begins with the path.
    """
    try:
        # Opening a pipe without a writer would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {_reason(error)}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path}: it is a folder; name the file in it")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path}: it is a pipe or a device, and each process reads it anew; name a file")
        with open(descriptor, "rb", closefd=False) as file:
            read = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {_reason(error)}") from None
    finally:
        os.close(descriptor)
    if len(read) > max_bytes:
        raise ConfigError(f"{path}: it has more than {max_bytes:,} bytes, and no such file is that large; name another")
    try:
        return read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = read[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not text in UTF-8: {error}; save it as UTF-8") from None


def read_json(path: str | Path, max_bytes: int = MAX_BYTES) -> Any:
    """Return what a JSON file holds.

    Raises:
        ConfigError: It cannot be read, or is not JSON; begins with the path.
    """
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {in_one_line(error)}") from None


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, ValueError):
        return f"no path: {error}"
    return f"it cannot be read: {os.strerror(error.errno or errno.EIO)}"
