"""Random masks that each device computes its own part of.

XLA does not partition its generator of random bits: each device would draw those of all. Here the bits are a hash of an
element's place in the tensor, in plain operations, which XLA partitions like any others. So a mask is also the same on
any number of devices. The hash is Threefry-2x32 of 20 rounds, from "Parallel Random Numbers: As Easy as 1, 2, 3"
(Salmon, Moraes, Dror, Shaw; SC 2011). Its key is drawn from XLA's generator for each mask.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_NUM_ROUNDS = 20
_WORD = 2**32
"""How many values a word of 32 bits has."""


def bernoulli(shape: Sequence[int], probability: float, device: torch.device) -> torch.Tensor:
    """Return a new mask of shape `shape`, true with a probability."""
    if not 0 <= probability <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={probability}")
    return mask(draw_key(device), shape, probability)


def mask(key: torch.Tensor, shape: Sequence[int], probability: float) -> torch.Tensor:
    """Return the mask of a key, of shape `shape` and true with a probability."""
    below = round(probability * _WORD)
    if below in (0, _WORD):
        return torch.full(tuple(shape), bool(below), device=key.device)
    made: torch.Tensor = _operations()["mask"](key, sizes=tuple(shape), below=below)
    return made


def uniform(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return float32 numbers of [0, 1), multiples of 2**-24, of shape `shape`."""
    numbers: torch.Tensor = _operations()["uniform"](draw_key(device), sizes=tuple(shape))
    return numbers


def bits(key: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the random bits of a key, int32 of shape (2,), as int32 of shape `shape`."""
    found: torch.Tensor = _operations()["bits"](key, sizes=tuple(shape))
    return found


def draw_key(device: torch.device) -> torch.Tensor:
    """Return a new key, int32 of shape (2,), from XLA's generator."""
    return torch.empty(2, dtype=torch.int32, device=device).random_()


@functools.cache
def _operations() -> dict[str, Any]:
    """Return the operations, each one node of the recorded program."""
    import torch_xla.core.xla_op_registry as registry

    return {
        "bits": registry.register("counter_bits", _bits),
        "mask": registry.register("counter_mask", _mask),
        "uniform": registry.register("counter_uniform", _uniform),
    }


def _bits(key: Any, sizes: tuple[int, ...]) -> Any:
    from torch_xla.core import xla_builder as xb

    return _hash(key, sizes).bitcast(xb.Type.S32)


def _mask(key: Any, sizes: tuple[int, ...], below: int) -> Any:
    hashed = _hash(key, sizes)
    return hashed < _number(key, below)


def _uniform(key: Any, sizes: tuple[int, ...]) -> Any:
    from torch_xla.core import xla_builder as xb

    top = _hash(key, sizes) / _number(key, 2**8)
    return top.bitcast(xb.Type.S32).cast(xb.Type.F32) * xb.Op.scalar(key.builder(), 2.0**-24, xb.Type.F32)


def _hash(key: Any, sizes: tuple[int, ...]) -> Any:
    """Return 32 random bits for each place of a tensor, by XLA's builder.

    Args:
        key: s32 of shape (2,).
        sizes: The tensor's.
    """
    from torch_xla.core import xla_builder as xb

    words = key.bitcast(xb.Type.U32)
    first, second = (words.slice_in_dim(at, at + 1, 0).reshape(()) for at in range(2))
    keys = (first, second, first ^ second ^ _number(key, _PARITY))
    high, low = _places(key, sizes)
    high, low = high + keys[0], low + keys[1]
    for round_ in range(_NUM_ROUNDS):
        by = _ROTATIONS[round_ // 4 % 2][round_ % 4]
        high = high + low
        low = ((low << _number(key, by)) | (low / _number(key, _WORD >> by))) ^ high
        if round_ % 4 == 3:
            turn = round_ // 4 + 1
            high, low = high + keys[turn % 3], low + (keys[(turn + 1) % 3] + _number(key, turn))
    return low


def _places(key: Any, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return two words for each place of a tensor, different at each: one alone numbers no more than 2**32."""
    from torch_xla.core import xla_builder as xb

    shape = xb.mkshape(xb.Type.U32, list(sizes))
    words = [_number(key, 0).broadcast(list(sizes)) for _ in range(2)]
    word, stride = 1, 1
    for dim in reversed(range(len(sizes))):
        if sizes[dim] == 1:
            continue
        if stride * sizes[dim] > _WORD:
            word, stride = 0, 1
        words[word] = words[word] + xb.Op.iota(key.builder(), shape, dim) * _number(key, stride)
        stride *= sizes[dim]
    return words[0], words[1]


def _number(key: Any, value: int) -> Any:
    from torch_xla.core import xla_builder as xb

    return xb.Op.scalar(key.builder(), value, xb.Type.U32)
