"""Read pickles that nobody vouches for: no code of theirs runs, and no memory is taken for what they only say."""

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from torchacc.errors import CheckpointError

MAX_PICKLE_BYTES = 1 << 28
"""More than any metadata takes: read, it takes up to a hundred times as much."""
_MAX_DEPTH = 64


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
