"""How a batch is cut along its length over the devices that share its samples. Plain tensors; knows no devices."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

IGNORED = -100
"""The label of a token that no loss counts."""


@dataclass(frozen=True)
class SequenceCut:
    """Which tokens of each sample a device computes: equally many, consecutive ones, the last devices' padded."""

    length: int
    """Tokens of each sample."""
    num_parts: int
    index: int
    """Which of the parts it is."""

    @property
    def part_length(self) -> int:
        """Tokens of each part, padding included."""
        return -(-self.length // self.num_parts)

    @property
    def is_padded(self) -> bool:
        """Whether the last parts contain padding."""
        return self.part_length * self.num_parts > self.length

    def part(self, whole: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Return this part of a tensor of shape (rows, length, …).

        Args:
            whole: The tensor.
            fill: The value of padding.
        """
        start = min(self.index * self.part_length, self.length)
        stop = min(start + self.part_length, self.length)
        own, missing = whole[:, start:stop], self.part_length - (stop - start)
        return F.pad(own, (0, 0) * (whole.dim() - 2) + (0, missing), value=fill) if missing else own.contiguous()

    def without_padding(self, joined: torch.Tensor) -> torch.Tensor:
        """Return a tensor of shape (rows, length, …) from all parts, one after another."""
        return joined[:, : self.length]


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return for each token the label of the next one, as causal language models predict it; of the last one none.

    Args:
        labels: Of shape (rows, length), of all parts.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)
