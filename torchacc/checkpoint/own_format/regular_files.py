"""Read files that nobody vouches for, opening no device, and write files that reach the disk."""

import io
import os
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple

from torchacc.errors import CheckpointError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, and nothing else: to open a pipe would wait for whoever writes to it.

    Raises:
        CheckpointError: It is not a file.
        OSError: It is not there, or must not be read.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISREG(mode):
            return io.BufferedReader(file)
        file.close()
    raise CheckpointError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}: a file is expected")


class FileState(NamedTuple):
    """What changes when a file is written or replaced."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Return a file's.

        Raises:
            CheckpointError: It is not there.
        """
        try:
            found = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


def read_regular(path: Path, limit: int) -> bytes:
    """Return all that a file holds.

    Raises:
        CheckpointError: It is not a file, or larger than anything that belongs there.
        OSError: It is not there, or must not be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size:,} bytes, and no such file has more than {limit:,}")
        return file.read(limit + 1)


def sync_folder(path: Path) -> None:
    """Sync a folder to the disk, with the names of what was made or renamed in it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_synced(path: Path, text: str) -> None:
    """Write a file, and let it reach the disk."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
