"""What stands in a model's output for what no device has."""

from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import tree_leaves

from torchacc.errors import EngineError, UnknownNameError


class MissingOutput:
    """Stands for an output that was not computed as a whole, and raises an error that says why when it is used.

    Args:
        name: The output's name.
        why: The message.
    """

    def __init__(self, name: str, why: str) -> None:
        self.__dict__.update(name=name, why=why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownNameError(self.why)

    def __getitem__(self, index: Any) -> Any:
        raise EngineError(self.why)

    def __iter__(self) -> Iterator[Any]:
        raise EngineError(self.why)

    def __len__(self) -> int:
        raise EngineError(self.why)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every function of PyTorch."""
        raise EngineError(next(each for each in tree_leaves((args, kwargs or {})) if isinstance(each, cls)).why)

    def __repr__(self) -> str:
        return f"<{self.why}>"
