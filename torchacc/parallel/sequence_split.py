"""How a batch is split along its length over the devices that share its samples. Plain tensors; knows no devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

import torch
from torch.nn import functional as F

from torchacc.errors import ConfigError

IGNORE_INDEX = -100
"""The label of what no loss counts, as in PyTorch's cross entropy."""


def head_parts(
    num_heads: Sequence[int], num_devices: int, tensor_parallel: int = 1, ring_size: int | None = None
) -> int:
    """Return over how many of the devices that share a sample the heads of attention are split.

    The others are further groups of as many devices, each of which computes attention for other tokens.

    Args:
        num_heads: Of each model that is split.
        num_devices: Devices that share a sample.
        tensor_parallel: Devices over which the layers are split, and so these heads, before.
        ring_size: How many groups there are, a divisor of `num_devices`; None for as few as can be.

    Raises:
        ConfigError: The heads cannot be split over as many devices as a group then has.
    """
    most = gcd(num_devices, *(heads // gcd(heads, tensor_parallel) for heads in num_heads))
    parts = most if ring_size is None else num_devices // ring_size
    if most % parts:
        raise ConfigError(
            f"config.dist.sp.ring_size = {ring_size} with config.dist.sp.size = {num_devices} splits attention heads "
            f"over {parts} devices, and {' and '.join(map(str, num_heads))} heads can be over {most}: leave ring_size "
            f"out, or set it to {num_devices // most}"
        )
    return parts


def chunks_of(group: int, num_groups: int) -> tuple[int, ...]:
    """Return which chunks of a sample, by their order, a group of devices attends from.

    One early and one late chunk (a zigzag), so that causal attention costs each group the same; all of the sample where
    there is one group.
    """
    return (0,) if num_groups == 1 else (group, 2 * num_groups - 1 - group)


@dataclass(frozen=True)
class CausalBlock:
    """What a group sees of another group's keys under a causal mask; each has an early and a late chunk of tokens."""

    queries: range
    """Which of its own chunks see some: 0 is the early one, and 1 the late one."""
    keys: range
    """Which of the other group's chunks they see."""
    is_causal: bool
    """Whether they see each token's own past alone, and not all."""


def causal_block(group: int, source: int) -> CausalBlock:
    """Return what a group sees of the keys of another, `source`, where `chunks_of()` says which chunks they have.

    Whichever they are, it is half of all pairs of queries and keys.
    """
    both = range(2)
    if source == group:
        return CausalBlock(both, both, is_causal=True)
    return CausalBlock(both, both[:1], False) if source < group else CausalBlock(both[1:], both, False)


def in_order(joined: torch.Tensor, num_groups: int, dim: int) -> torch.Tensor:
    """Return a tensor in the order of a sample's tokens from those of all groups, one after another.

    Args:
        joined: The tensor.
        num_groups: Groups of devices.
        dim: The dimension of tokens, padding included.
    """
    if num_groups == 1:
        return joined
    order = [chunk for group in range(num_groups) for chunk in chunks_of(group, num_groups)]
    chunks = joined.chunk(len(order), dim)
    return torch.cat([chunks[order.index(chunk)] for chunk in range(len(order))], dim)


@dataclass(frozen=True)
class SequenceSplit:
    """Which tokens of each sample a device computes: equally many, the last ones of a sample padded.

    Devices are in groups, and each group has the chunks that `chunks_of()` says; within it each device has consecutive
    ones of these tokens.
    """

    length: int
    """Tokens of each sample."""
    num_parts: int
    index: int
    """Which of the parts it is."""
    num_groups: int = 1
    """Groups of devices that attend from the same tokens, with different heads; it divides the parts."""

    @property
    def part_length(self) -> int:
        """Tokens of each part, padding included."""
        multiple = lcm(self.num_parts, self._num_chunks)
        return -(-self.length // multiple) * multiple // self.num_parts

    @property
    def is_padded(self) -> bool:
        """Whether some parts contain padding."""
        return self.part_length * self.num_parts > self.length

    @property
    def _num_chunks(self) -> int:
        return 1 if self.num_groups == 1 else 2 * self.num_groups

    @property
    def _group_chunks(self) -> list[range]:
        """The tokens that this device's group attends from."""
        size = self.part_length * self.num_parts // self._num_chunks
        group = self.index * self.num_groups // self.num_parts
        return [range(chunk * size, (chunk + 1) * size) for chunk in chunks_of(group, self.num_groups)]

    @property
    def spans(self) -> list[range]:
        """The tokens of this part, in its order; from `length` on they are padding."""
        start = self.index % (self.num_parts // self.num_groups) * self.part_length
        found, stop = [], start + self.part_length
        for chunk in self._group_chunks:
            found.append(chunk[max(start, 0) : max(stop, 0)])
            start, stop = start - len(chunk), stop - len(chunk)
        return [span for span in found if span]

    def part(self, full: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Return this part of a tensor of shape (rows, length, …).

        Args:
            full: The tensor.
            fill: The value of padding.
        """
        return _taken(full, self.spans, 1, fill)

    def queries(self, mask: torch.Tensor) -> torch.Tensor:
        """Return what of an attention mask of shape (…, length, length) this device's group applies to its queries.

        Padding sees all, so that its attention is a number; nothing sees it.
        """
        if self.num_groups == 1 and not self.is_padded:
            return mask
        return _taken(mask, self._group_chunks, mask.dim() - 2, mask.dtype == torch.bool)

    def without_padding(self, joined: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape (rows, length, …) from all parts, one after another."""
        return in_order(joined, self.num_groups, 1)[:, : self.length]


def _taken(full: torch.Tensor, spans: Sequence[range], dim: int, fill: int) -> torch.Tensor:
    """Return spans of a dimension one after another; what is behind its end is filled."""
    length, found = full.shape[dim], []
    for span in spans:
        start, stop = min(span.start, length), min(span.stop, length)
        own, missing = full.narrow(dim, start, stop - start), len(span) - (stop - start)
        behind = (0, 0) * (full.dim() - 1 - dim) + (0, missing)
        found.append(F.pad(own, behind, value=fill) if missing else own)
    return found[0].contiguous() if len(found) == 1 else torch.cat(found, dim)


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return for each token the label of the next one, as causal language models predict it; of the last one none.

    Args:
        labels: Of shape (rows, length), of all parts.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
