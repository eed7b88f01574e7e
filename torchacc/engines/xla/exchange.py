"""What processes with one XLA device each exchange: weights, gradients, and a few scalars."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from torchacc.engines.xla.blocks import Block
from torchacc.engines.xla.gather import Gatherer, Weight
from torchacc.topology import Topology


class BlockGatherer(Gatherer):
    """A unit whose weights lie in blocks of which this process holds shards."""

    shards_stand_alone = False

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__([weight for block in blocks for weight in block.weights])
        self.blocks = blocks


class Exchange(ABC):
    """The collectives of one model, by one means of communication."""

    def __init__(self, topology: Topology, device: int) -> None:
        self.num_devices = topology.num_devices
        self.num_shards = topology.size("fsdp")
        self.shard_index = topology.coordinates(device)["fsdp"]
        self.holds_gradients = False
        """Whether backward keeps whole gradients, to be reduced by a later one."""
        self.reduce_dtype = torch.float32
        """The dtype in which gradients are summed; float32 stands for float64, too, where parameters have it."""

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the gradients of parameters of a dtype are summed."""
        return torch.promote_types(dtype, torch.float32) if self.reduce_dtype == torch.float32 else self.reduce_dtype

    @abstractmethod
    def make_gatherer(self, blocks: list[Block], *, gathers_again: bool) -> BlockGatherer:
        """Return the gatherer of a unit with these blocks."""

    def forget_failed_backward(self) -> None:
        """Drop what a backward that raised has left."""

    def drop_gradients(self) -> None:
        """Drop the whole gradients that have not been reduced."""

    @abstractmethod
    def average(self, scalars: torch.Tensor) -> torch.Tensor:
        """Return the mean over all devices of a device tensor of shape (n,). Collective: every process."""

    @abstractmethod
    def combine_norms(self, norms: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the norm over all shards from this process's norms, of shape (n,). Collective: every process.

        Returns:
            A device tensor without dimensions.
        """


def weight_places(blocks: Sequence[Block]) -> dict[Weight, tuple[Block, int]]:
    """Return for each weight its block, and its index in there."""
    return {weight: (block, index) for block in blocks for index, weight in enumerate(block.weights)}
