"""Unshard a unit's weights while its forward runs, and again when its backward needs them.

The modules keep the shards as their parameters, under the original names. A forward hook puts the unsharded weight in
front of the shard (an instance attribute hides a registered parameter of the same name), and takes it away afterwards.
What autograd saves of an unsharded weight is only a note of the shard: the weight is gathered anew in backward, so that
it need not live in between. This is ZeRO-3 (Rajbhandari et al., 2020).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from torchacc.errors import EngineError
from torchacc.parallel.plan import ParameterOwner

_MOST_WEIGHTS = 2**20
"""Of one model."""


@dataclass(eq=False)
class Weight:
    """One parameter of the model: its shard, and the places where modules look it up."""

    name: str
    shard: nn.Parameter
    owners: list[ParameterOwner]
    shape: tuple[int, ...]
    """The shape of the unsharded weight."""
    dtype: torch.dtype
    """The dtype that the unsharded weight is computed with."""
    number: int
    """Another one for each weight of the models that are alive."""

    def with_unique_hash(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the weight's values in a graph that is another one than any other weight's.

        torch_xla knows a program by a hash that does not tell which of two like inputs an operation reads. The loss of
        one head of a model and that of another would be one program, where both heads have run. So the hash is given
        the weight's number, as the value of a padding of no elements, which XLA leaves out.
        """
        if not tensor.is_floating_point() or not tensor.dim():
            return tensor
        return torch.constant_pad_nd(tensor, [0, 0], self.number)


_models: WeakValueDictionary[int, Any] = WeakValueDictionary()


def weight_numbers(model: Any) -> Iterator[int]:
    """Return numbers for a model's weights, which no other model that is alive has.

    A model that takes the place of one that is gone has the numbers of that one, and so its compiled programs.
    """
    place = next(place for place in count() if place not in _models)
    _models[place] = model
    return count(place * _MOST_WEIGHTS)


class Gatherer(ABC):
    """How the unsharded weights of one unit come about on one kind of runtime."""

    keeps_weights: bool = False
    """Whether backward uses the unsharded weights of forward, instead of gathering them again."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = weights

    @abstractmethod
    def gather(self) -> list[torch.Tensor]:
        """Return the unit's unsharded weights, connected to their shards for autograd."""

    def gather_for_backward(self, weight: Weight) -> torch.Tensor:
        """Return an unsharded weight for use in backward; not called where `keeps_weights` is set."""
        raise NotImplementedError

    def keep_edit(self, weight: Weight, full: torch.Tensor) -> None:
        """Give the shard what the module's own forward has made of the unsharded weight.

        Raises:
            EngineError: It cannot be given.
        """
        raise lost_edit(weight.name, EDITED_PER_PROCESS)

    def gather_all_for_backward(self) -> list[torch.Tensor]:
        """Return the unit's unsharded weights for use in backward; not called where `keeps_weights` is set."""
        return [self.gather_for_backward(weight) for weight in self.weights]


def install_unit(module: nn.Module, gatherer: Gatherer) -> "UnitHooks":
    """Register the hooks that gather a unit's weights around its forward.

    Args:
        module: The unit.
        gatherer: Knows the unit's weights and how they are gathered.
    """
    hooks = UnitHooks(module, gatherer)
    if not gatherer.weights:
        return hooks
    module.register_forward_pre_hook(hooks.before)
    module.register_forward_hook(hooks.after, always_call=True)
    return hooks


def replace_parameter(owners: Sequence[ParameterOwner], new: nn.Parameter) -> None:
    """Register a parameter in all places of an old one, with what the user noted on the old one."""
    old = owners[0][0]._parameters[owners[0][1]]
    vars(new).update(vars(old))
    for module, name in owners:
        module._parameters[name] = new
        _refresh_rnn(module)


class WeightSource(Protocol):
    """What a unit's unsharded weights come from while a module around it is recomputed, or runs as a loop."""

    def unsharded_weights(self, gatherer: Gatherer) -> list[torch.Tensor]:
        """Return the unsharded weights of a unit."""


class UnitHooks:
    """What happens before and after a unit's forward."""

    def __init__(self, module: nn.Module, gatherer: Gatherer) -> None:
        self.module = module
        self.gatherer = gatherer
        self.unsharded: list[torch.Tensor] = []
        """The unsharded weights that modules find now."""
        self.within: WeightSource | None = None
        """The recomputed module, or the loop, that this unit runs in, which saves for backward by itself."""
        self._saving: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._as_gathered: list[tuple[Any, int]] = []
        """The storage of each unsharded weight, and how often that had been edited when it was gathered."""

    def before(self, module: nn.Module, args: Any) -> None:
        """Gather."""
        if self.within is not None:
            self.unshard(self.within.unsharded_weights(self.gatherer))
            return
        self.unshard(self.gatherer.gather())
        if not self.gatherer.keeps_weights and torch.is_grad_enabled():
            self._saving.append(_save_notes(self.gatherer, self.unsharded))
            self._saving[-1].__enter__()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free."""
        if self._saving:
            self._saving.pop().__exit__()
        edited = self.edited()
        self.reshard()
        for weight, full in edited:
            if self.within is not None:
                raise lost_edit(weight.name, EDITED_TWICE)
            self.gatherer.keep_edit(weight, full)
        for weight in self.gatherer.weights:
            for owner, name in weight.owners:
                if owner._parameters.get(name, weight.shard) is not weight.shard:
                    raise lost_edit(weight.name, "it puts another one in its place, which no optimizer knows")

    def edited(self) -> list[tuple[Weight, torch.Tensor]]:
        """Return the weights that were edited since they were gathered, each with its unsharded weight."""
        gathered = zip(self.gatherer.weights, self.unsharded, self._as_gathered, strict=False)  # all or none of them
        return [(weight, full) for weight, full, before in gathered if storage_and_edits(full) != before]

    def unshard(self, full: list[torch.Tensor]) -> None:
        """Register the unsharded weights on the modules."""
        self.unsharded = full
        self._as_gathered = [storage_and_edits(tensor) for tensor in full]
        for weight, tensor in zip(self.gatherer.weights, full, strict=True):
            for owner, name in weight.owners:
                owner.__dict__[name] = tensor
                _refresh_rnn(owner)

    def reshard(self) -> None:
        """Register the shards on the modules again."""
        self.unsharded, self._as_gathered = [], []
        for weight in self.gatherer.weights:
            for owner, name in weight.owners:
                owner.__dict__.pop(name, None)
                _refresh_rnn(owner)

    def has_weights_in(self, modules: Collection[nn.Module]) -> bool:
        """Return whether any of these modules looks up a weight of the unit."""
        return any(owner in modules for weight in self.gatherer.weights for owner, _ in weight.owners)


def _save_notes(gatherer: Gatherer, full: Sequence[torch.Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Context manager in which autograd saves a reference to the shard in place of an unsharded weight or its view."""
    # Private to torch 2.9, the only one that torch_xla 2.9 loads with.
    from torch._C._functionalization import apply_view_meta_sequence, get_view_meta_sequence

    # A view shares its base's storage: a linear layer saves `weight.t()`. How the two differ is in none of its shape,
    # strides and values: on XLA strides are always those of a contiguous tensor, and a weight may be square.
    known = {_storage(tensor): weight for weight, tensor in zip(gatherer.weights, full, strict=True)}

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[Weight, int, list[Any]]:
        weight = known.get(_storage(tensor))
        return tensor if weight is None else (weight, weight.shard._version, get_view_meta_sequence(tensor))

    def unpack(saved: torch.Tensor | tuple[Weight, int, list[Any]]) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        weight, version, views = saved
        if weight.shard._version != version:  # as autograd checks what it has saved itself
            raise EngineError(
                f"{weight.name!r} is needed for the gradients of a forward, and has been modified by an inplace "
                "operation since: an optimizer's step, a load or an edit. Call backward() before it"
            )
        return apply_view_meta_sequence(gatherer.gather_for_backward(weight), views)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


EDITED_PER_PROCESS = "each process would edit a copy of its own, by the samples that it has itself"
EDITED_TWICE = "that forward is recomputed in backward, where the edit would be made once more"


def lost_edit(name: str | None, reason: str) -> EngineError:
    """Return what says that a forward has edited a weight where that cannot be kept.

    Args:
        name: The weight's, where it is known.
        reason: Why it cannot.
    """
    which = "one of its parameters" if name is None else f"its parameter {name!r}"
    return EngineError(
        f"the model's own forward edits {which}: {reason}. Edit parameters between two steps, under torch.no_grad(), "
        "or keep what the forward edits as a buffer"
    )


def storage_and_edits(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return what tells whether a tensor was edited, by itself, by an alias as `.data` is, or in part."""
    return tensor.untyped_storage()._cdata, torch._functionalize_mutation_counter(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _refresh_rnn(module: nn.Module) -> None:
    """Renew the list in which nn.RNN, nn.LSTM and nn.GRU keep their parameters a second time."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
