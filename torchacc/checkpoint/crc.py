"""CRC-32 of bytes that are written in pieces and in any order: checksums that can be joined, as zlib's `crc32_combine`.

A CRC is a polynomial over GF(2) modulo a fixed one. Appending n bytes multiplies what came before by x**(8 n).
"""

import zlib
from dataclasses import dataclass
from functools import cache

_POLYNOMIAL = 0xEDB88320  # without its highest bit; the bits are reversed, here and in all of the below
_ONE, _X = 1 << 31, 1 << 30
_ZEROS = bytes(1 << 16)


@dataclass(frozen=True)
class Crc:
    """The checksum of a run of bytes."""

    value: int = 0
    size: int = 0
    """Length of the run."""

    @classmethod
    def of(cls, run: bytes | memoryview) -> "Crc":
        """Return the checksum of bytes."""
        return cls(zlib.crc32(run), len(run))

    def then(self, after: "Crc") -> "Crc":
        """Return the checksum of this run followed by another."""
        return Crc(_multiply(_power_of_x(8 * after.size), self.value) ^ after.value, self.size + after.size)

    def zeros(self, count: int) -> "Crc":
        """Return the checksum of this run followed by `count` zero bytes."""
        value, left = self.value, count
        while left:
            value = zlib.crc32(_ZEROS[:left], value)
            left -= min(left, len(_ZEROS))
        return Crc(value, self.size + count)


def _multiply(left: int, right: int) -> int:
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & 0xFFFFFFFF
        right = (right >> 1) ^ (_POLYNOMIAL if right & 1 else 0)
    return product


@cache
def _power_of_x(exponent: int) -> int:
    if exponent < 2:
        return _X if exponent else _ONE
    half = _power_of_x(exponent // 2)
    square = _multiply(half, half)
    return _multiply(square, _X) if exponent % 2 else square
