"""A parameter, or a state of its shape, as the rank files of a set hold it: which shard has which elements."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod

import torch

from torchacc.checkpoint.other_formats.new_tensors import NewTensor, Source, short, split
from torchacc.checkpoint.own_format.safetensors_files import FileRegion
from torchacc.errors import CheckpointError
from torchacc.parallel.sharding import TORCH_XLA_MULTIPLE, FlatLayout, RowLayout

XLA_SHARD = "_fsdp_shard"
"""How torch_xla's names of sharded parameters begin."""


class ShardFormat(Enum):
    """How a parameter is sharded into tensors of equal size."""

    FLAT = "flattened, in multiples of 128 elements"
    """As torch_xla does unless told otherwise."""
    ROWS = "along the first dimension"
    """As torchacc does, and torch_xla with `shard_param_on_dim_0`."""


@dataclass(frozen=True)
class ShardedParameter:
    """What is sharded as one tensor: a parameter, or several flattened one after another."""

    key: str
    """Its name in the `model` of a rank file."""
    members: tuple[tuple[str, tuple[int, ...]], ...]
    """Original names and shapes of the parameters."""
    shape: tuple[int, ...]
    """The unsharded shape: the parameter's, or one dimension."""

    @property
    def numel(self) -> int:
        """Elements of the unsharded tensor."""
        return prod(self.shape)

    @property
    def from_xla(self) -> bool:
        """Whether torch_xla sharded it."""
        return self.key.rpartition(".")[2].startswith(XLA_SHARD)

    def shard_shape(self, shard_format: ShardFormat, count: int) -> tuple[int, ...]:
        """Return the shape of one of `count` shards, padding included."""
        if shard_format is ShardFormat.FLAT:
            return FlatLayout(self.shape, count, TORCH_XLA_MULTIPLE).shard_shape
        return RowLayout(self.shape, count).shard_shape

    def is_shard(self, shape: tuple[int, ...], shard_format: ShardFormat, count: int) -> bool:
        """Return whether a tensor of this shape can be the first of `count` shards of this, or of state like it."""
        expected = self.shard_shape(shard_format, count)
        if shard_format is ShardFormat.FLAT:
            return self.from_xla and shape == expected
        is_number = shape == self.shape == ()  # which each rank may have as it is
        return is_number or shape in (expected, (prod(expected),))


@dataclass(frozen=True)
class Sharded:
    """A parameter, or an optimizer's state of the same shape, in all rank files of a set."""

    parameter: ShardedParameter
    name: str
    """Named in errors: the parameter's key, and that of the state."""
    regions: tuple[FileRegion, ...]
    """The shards by rank; the last ones may lack their padding."""

    def __post_init__(self) -> None:
        """Check that these can be the shards of one tensor."""
        first, count = self.regions[0], len(self.regions)
        if not any(self.parameter.is_shard(first.shape, each, count) for each in ShardFormat):
            raise CheckpointError(
                f"{first.path}: {self.name} is {_describe(first)}, which is not one of {count} shards of "
                f"{self.parameter.shape}: the tensor and shard_metadata contradict each other"
            )
        for region, _, held in self.sources:
            is_flat = len(region.shape) == 1 or region.shape[1:] == self.parameter.shape[1:]
            is_flat = is_flat and (bool(region.shape) or not self.parameter.shape)
            if not is_flat or region.numel not in (held, first.numel) or region.dtype != first.dtype:
                raise CheckpointError(
                    f"{region.path}: {self.name} is {_describe(region)}, where rank 0 of {count} has "
                    f"{_describe(first)}: these are not files of one save"
                )

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The shards without their padding, which together are the flattened tensor."""
        each, numel = self.regions[0].numel, self.parameter.numel  # the first shard has all of its elements
        return tuple(
            Source(region, 0, min(each, max(0, numel - rank * each))) for rank, region in enumerate(self.regions)
        )

    @property
    def lacks_padding(self) -> bool:
        """Whether what lies beyond the end of the unsharded tensor is left out of the last shards."""
        return any(region.numel < self.regions[0].numel for region in self.regions)

    def full(self, dtype: torch.dtype | None = None, entry: str = "") -> dict[str, NewTensor]:
        """Return the full tensors that it is made of, by original name.

        Args:
            dtype: What floating tensors are cast to.
            entry: Added to the tensors' names in messages.
        """
        own = cast_to(dtype, self.regions[0].dtype)
        members = self.parameter.members
        parts = split(self.sources, [prod(shape) for _, shape in members])
        return {
            name: NewTensor(name + entry, own, shape, part) for (name, shape), part in zip(members, parts, strict=True)
        }

    def resharded(self, shapes: Sequence[tuple[int, ...]]) -> list[NewTensor]:
        """Return the shards of these shapes that it becomes."""
        parts = split(self.sources, [prod(shape) for shape in shapes])
        return [
            NewTensor(self.name, self.regions[0].dtype, shape, part) for shape, part in zip(shapes, parts, strict=True)
        ]

    def has_format(self, shard_format: ShardFormat) -> bool:
        """Return whether the shards are sharded so."""
        shape, count = self.regions[0].shape, len(self.regions)
        if self.parameter.from_xla and shard_format is ShardFormat.ROWS:
            return shape == self.parameter.shard_shape(shard_format, count)
        return self.parameter.is_shard(shape, shard_format, count)


def _describe(region: FileRegion) -> str:
    return f"{short(region.dtype)} {region.shape}"


def cast_to(dtype: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """Return what a tensor is cast to where floating ones are to be of a dtype; those of 8 bits are quantized."""
    return dtype if dtype is not None and own.is_floating_point and own.itemsize > 1 else own
