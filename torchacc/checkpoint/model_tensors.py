"""The tensors that a model has, and those of a checkpoint's folder that have their names."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from torchacc.checkpoint import model_state
from torchacc.checkpoint.own_format.checkpoint_folder import CheckpointFolder, StoredTensor
from torchacc.engines.sharded_model import ShardedModel
from torchacc.errors import CheckpointError, listed

_EXACT = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
"""What a weight may be stored as; anything else is quantized, and no weight without its scales."""


class FoundTensors(NamedTuple):
    """What of a model is in a folder."""

    tensors: dict[str, StoredTensor]
    missing: list[str]
    unexpected: list[str]

    def misfit(self, wanted: "ModelTensors", folder: CheckpointFolder) -> str:
        """Return what does not fit."""
        problems = []
        if self.missing:
            problems.append(f"lacks {len(self.missing)} of the {len(wanted.shapes)} tensors of {wanted.model_class}: ")
            problems[-1] += listed(self.missing)
        if self.unexpected:
            problems.append(f"holds {len(self.unexpected)} tensors that {wanted.model_class} does not have: ")
            problems[-1] += listed(self.unexpected)
        return (
            f"{folder.path} {', and '.join(problems)}. Is it a checkpoint of another model, or without this one's "
            "head? from_pretrained() makes up what is missing and passes over the rest, and its model can be given to "
            "accelerate()."
        )


class ModelTensors:
    """The tensors that a model has."""

    def __init__(self, sharded: ShardedModel) -> None:
        self.model_class = sharded.plan.units[-1].module_class
        self.has_values = sharded.status.has_weights
        self.parameters = {planned.name for planned in sharded.plan.parameters}
        buffers = dict(model_state.named_buffers(sharded.model))
        self.names = {planned.name: planned.names for planned in sharded.plan.parameters}
        self.names |= {name: (name,) for name in buffers}
        self.shapes = {planned.name: planned.shape for planned in sharded.plan.parameters}
        self.shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}

    @property
    def known(self) -> dict[str, str]:
        """Every name -> the first name of the same tensor."""
        return {alias: name for name, names in self.names.items() for alias in names}


def find_by_name(wanted: ModelTensors, folder: CheckpointFolder) -> FoundTensors:
    """Find what is in a folder under a name that it has in the model."""
    copies = {name: [folder.model[n] for n in names if n in folder.model] for name, names in wanted.names.items()}
    tensors = {name: one_of(found) for name, found in copies.items() if found}
    known = wanted.known
    return FoundTensors(tensors, [n for n in copies if n not in tensors], [n for n in folder.model if n not in known])


def check_tensors(wanted: ModelTensors, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError where a tensor has another shape than the model's, or is a quantized parameter."""
    for name, stored in tensors.items():
        if stored.shape != wanted.shapes[name]:
            raise CheckpointError(
                f"{stored.origin} has the shape {stored.shape}, and the model's {name} has {wanted.shapes[name]}"
            )
        if name in wanted.parameters and stored.dtype not in _EXACT:
            raise CheckpointError(
                f"{stored.origin} is {stored.dtype}, and without what it was quantized with no weight: open the "
                "checkpoint with from_pretrained(), dequantize it, and save it again"
            )


def one_of(copies: Sequence[StoredTensor]) -> StoredTensor:
    """Return a tied tensor that lies in the folder under several of its names, which must be equal there."""
    first, *others = copies
    if not others:
        return first

    def fill(target: torch.Tensor, start: int) -> None:
        exact = torch.float64 if first.dtype.is_floating_point else first.dtype
        elements = torch.empty(len(target), dtype=exact)
        first.fill(elements, start)
        for other in others:
            same = torch.empty(len(target), dtype=exact)
            if other.shape == first.shape:
                other.fill(same, start)
            if other.shape != first.shape or not torch.equal(elements, same):
                raise CheckpointError(
                    f"{first.origin} and {other.origin} are different, and one parameter in this model: build it with "
                    "tie_word_embeddings=False"
                )
        target.copy_(elements)

    return StoredTensor(first.shape, first.dtype, first.origin, fill)
