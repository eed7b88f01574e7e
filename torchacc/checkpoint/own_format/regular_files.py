"""Read files that nobody vouches for: no device is opened, no memory taken for what a file only says of itself."""

import io
import os
import pickle
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, NamedTuple

from typing_extensions import override

from torchacc.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 28
"""More than any metadata takes: read, it takes up to a hundred times as much."""
_MAX_DEPTH = 64
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
        CheckpointError: It is no file.
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
        CheckpointError: It is no file, or larger than anything that belongs there.
        OSError: It is not there, or must not be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size:,} bytes, and no such file has more than {limit:,}")
        return file.read(limit + 1)


class Unpickler(pickle._Unpickler):
    """Reads a pickle of plain values and of what `find_class` allows.

    In Python: C's takes as much memory as a number in the pickle says, which a file of nine bytes may hold.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))

    @override
    def find_class(self, module: str, name: str) -> Any:
        raise CheckpointError(f"a pickle names {module}.{name}")

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it holds what torch.save never writes")

    def _build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if isinstance(target, type) or callable(target):  # whose attributes are everybody's
            self._refuse()
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = _build
    for _opcode in (
        pickle.BYTEARRAY8,
        pickle.NEXT_BUFFER,
        pickle.READONLY_BUFFER,
        pickle.EXT1,
        pickle.EXT2,
        pickle.EXT4,
    ):
        dispatch[_opcode[0]] = _refuse


def check_tree(tree: Any, pickled_bytes: int, path: Path) -> None:
    """Refuse containers that hold themselves, or each other so often that to walk through them would never end.

    Raises:
        CheckpointError: They do.
    """
    left = 1000 + 10 * pickled_bytes
    level: list[Any] = [tree]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                inner += value.values()
            elif type(value) in (list, tuple, set, frozenset):
                inner += value
            left -= 1
            if len(inner) > left:
                raise CheckpointError(f"{path} is damaged: what it holds is nested in itself")
        if not inner:
            return
        level = inner
    raise CheckpointError(f"{path} is damaged: what it holds is nested more than {_MAX_DEPTH} times")


def size_of(file: IO[bytes]) -> int:
    """Return how many bytes a file, or a part of one, has."""
    before = file.tell()
    size = file.seek(0, io.SEEK_END)
    file.seek(before)
    return size
