"""What stands for the logits between a model's head and its loss: the hidden states, and what is done to the logits."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from torchacc.errors import ConfigError, UnknownNameError

Step = Callable[[torch.Tensor, Mapping[int, torch.Tensor]], torch.Tensor]
"""Computes logits from logits, element by element, for any tokens; the mapping has what replaces tensors, by `id()`"""

_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": torch.add,
    "clamp": torch.clamp,
    "clip": torch.clamp,
    "div": torch.div,
    "divide": torch.div,
    "mul": torch.mul,
    "multiply": torch.mul,
    "neg": torch.neg,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "true_divide": torch.div,
}
"""Operations that models have between head and loss, by their names -> PyTorch's function."""
_CASTS: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
_SAME = ("contiguous", "clone")
"""Operations that change no value and no order."""


class LazyLogits:
    """Logits of shape (..., vocabulary) that are not there.

    Models cut, reshape, scale, cap and cast it as they would the logits. What they do to tokens is done to the hidden
    states; what they do to each logit is noted, and done to the chunks of the loss. `F.cross_entropy()` computes that
    loss. Anything else raises.

    Args:
        hidden: What the head was given, of shape (..., hidden size).
        vocabulary: How many logits a token has.
        dtype: That of the logits.
        source: Knows the head, and computes the loss.
        steps: What is done to the logits that the head returns.
    """

    def __init__(
        self, hidden: torch.Tensor, vocabulary: int, dtype: torch.dtype, source: Any, steps: tuple[Step, ...] = ()
    ) -> None:
        self.hidden = hidden
        self.vocabulary = vocabulary
        self.dtype = dtype
        self.source = source
        self.steps = steps
        source.note(self)

    def release(self) -> None:
        """Free the hidden states, once the forward has ended."""
        self.hidden, self.steps = torch.empty(self.hidden.shape, device="meta"), ()

    @property
    def shape(self) -> torch.Size:
        """The shape that the logits would have."""
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def device(self) -> torch.device:
        """The device that they would be on."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """The number of their dimensions."""
        return self.hidden.dim()

    def dim(self) -> int:
        """Return the number of their dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the shape that the logits would have, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        """Return the first size."""
        return self.shape[0]

    def __repr__(self) -> str:
        """Return what this is."""
        return f"LazyLogits(shape={tuple(self.shape)}, compute.chunked_loss)"

    def view(self, *shape: Any) -> "LazyLogits":
        """Reshape tokens; the last size remains that of the vocabulary."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
        *tokens, last = sizes
        if last != self.vocabulary and (last != -1 or prod(tokens) != prod(self.shape[:-1])):
            raise self._refused(f"view({', '.join(map(str, sizes))})")
        return self._with(self.hidden.reshape(*tokens, self.hidden.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "LazyLogits":
        """Join dimensions of tokens."""
        if end_dim % self.ndim == self.ndim - 1:
            raise self._refused(f"flatten({start_dim}, {end_dim})")
        return self._with(self.hidden.flatten(start_dim, end_dim))

    def transpose(self, dim0: int, dim1: int) -> "LazyLogits":
        """Swap dimensions of tokens."""
        if self.ndim - 1 in (dim0 % self.ndim, dim1 % self.ndim):
            raise self._refused(f"transpose({dim0}, {dim1})")
        return self._with(self.hidden.transpose(dim0, dim1))

    def __getitem__(self, index: Any) -> "LazyLogits":
        """Choose tokens."""
        places = index if isinstance(index, tuple) else (index,)
        if sum(_num_dims(place) for place in places if place is not Ellipsis) >= self.ndim:
            places = tuple(place for place in places if place is not Ellipsis)  # which stands for no dimension
        last = places[-1]
        if any(place is Ellipsis for place in places):
            reaches_last = last is not Ellipsis
        else:
            reaches_last = sum(_num_dims(place) for place in places) >= self.ndim
        if reaches_last and not (isinstance(last, slice) and last == slice(None)):
            raise self._refused("[…] of the vocabulary")
        return self._with(self.hidden[index])

    def to(self, *args: Any, **kwargs: Any) -> "LazyLogits":
        """Cast the logits; where they are they stay."""
        found = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype | torch.Tensor)]
        if not found:
            return self
        dtype = found[0] if isinstance(found[0], torch.dtype) else found[0].dtype
        return self._cast(dtype)

    def type_as(self, other: Any) -> "LazyLogits":
        """Cast the logits to the dtype of a tensor."""
        return self._cast(other.dtype)

    def _cast(self, dtype: torch.dtype) -> "LazyLogits":
        steps = (*self.steps, lambda logits, _: logits.to(dtype))
        return LazyLogits(self.hidden, self.vocabulary, dtype, self.source, steps)

    def __getattr__(self, name: str) -> Any:
        """Return a method that is one of `_ELEMENTWISE`, `_CASTS` or `_SAME`; any other name is refused."""
        if name in _ELEMENTWISE:
            return lambda *args, **kwargs: self._elementwise(_ELEMENTWISE[name], (self, *args), kwargs)
        if name in _CASTS:
            return lambda: self._cast(_CASTS[name])
        if name in _SAME:
            return lambda *args, **kwargs: self
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownNameError(self.source.explain(f".{name}"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch that is given lazy logits."""
        kwargs = kwargs or {}
        lazy = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, LazyLogits))
        if func is F.cross_entropy:
            return lazy.source.cross_entropy(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        name = name.strip("_") if name.startswith("__") else name  # add_() is not add()
        if name in _ELEMENTWISE:
            return lazy._elementwise(func, args, kwargs)
        raise lazy._refused(f"{name}()")

    def _elementwise(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "LazyLogits":
        """Record an operation with numbers, or with tensors that are alike for all tokens."""
        others = [*(value for value in args if value is not self), *kwargs.values()]
        tensors = [other for other in others if isinstance(other, torch.Tensor)]
        if len(others) + 1 != len(args) + len(kwargs) or any(isinstance(other, LazyLogits) for other in others):
            raise self._refused(f"{func.__name__}() of two")
        if any(tensor.numel() not in (1, self.vocabulary) or hasattr(tensor, "to_local") for tensor in tensors):
            raise self._refused(f"{func.__name__}() with a tensor that differs between tokens or processes")
        self.source.note_operands(tensors)

        def step(logits: torch.Tensor, stand_ins: Mapping[int, torch.Tensor]) -> torch.Tensor:
            given = [logits if value is self else stand_ins.get(id(value), value) for value in args]
            named = {name: stand_ins.get(id(value), value) for name, value in kwargs.items()}
            result: torch.Tensor = func(*given, **named).reshape(logits.shape)
            return result

        return LazyLogits(self.hidden, self.vocabulary, self.dtype, self.source, (*self.steps, step))

    def __add__(self, other: Any) -> "LazyLogits":
        """Add what is alike for all tokens."""
        return self._elementwise(torch.add, (self, other), {})

    __radd__ = __add__

    def __sub__(self, other: Any) -> "LazyLogits":
        """Subtract what is alike for all tokens."""
        return self._elementwise(torch.sub, (self, other), {})

    def __mul__(self, other: Any) -> "LazyLogits":
        """Multiply by what is alike for all tokens."""
        return self._elementwise(torch.mul, (self, other), {})

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "LazyLogits":
        """Divide by what is alike for all tokens."""
        return self._elementwise(torch.div, (self, other), {})

    def __neg__(self) -> "LazyLogits":
        """Negate."""
        return self._elementwise(torch.neg, (self,), {})

    def _with(self, hidden: torch.Tensor) -> "LazyLogits":
        return LazyLogits(hidden, self.vocabulary, self.dtype, self.source, self.steps)

    def _refused(self, what: str) -> ConfigError:
        return ConfigError(self.source.explain(what))


def _num_dims(place: Any) -> int:
    """Return how many dimensions an item of an index chooses from."""
    if isinstance(place, torch.Tensor) and place.dtype == torch.bool:
        return place.dim()
    return int(place is not None)
