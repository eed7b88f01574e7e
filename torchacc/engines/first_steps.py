"""Watches the first steps of a model with a process for each device, for inputs that no step can be right with.

Of two steps the inputs are looked at, and nothing costs anything later. The processes compare them before the
optimizer's step, as that is where all of them come together, however many forwards there were.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchacc.data import digest_of, tensors_in
from torchacc.engines.device_losses import are_weighed
from torchacc.logging import get_logger
from torchacc.parallel.sequence_split import IGNORE_INDEX

_log = get_logger(__name__)

_STEPS = 2
_FORWARDS = 8
"""How many forwards of a step are looked at."""


@dataclass
class _Batches:
    """The batches that the loaders of this process have given."""

    num_delivered: int = 0


_batches = _Batches()


def note_batch() -> None:
    """Record that a loader of ours gives the script a batch, for whichever of its models."""
    _batches.num_delivered += 1


ToHost = Callable[[list[torch.Tensor]], "list[torch.Tensor] | None"]


@dataclass(frozen=True)
class _SeenLabels:
    """What a process notes of integers that may be labels."""

    are_labels: bool
    """Whether they are called so, or some are ignored."""
    num_counted: int
    """How many are not ignored."""
    num_predicted: int
    """The same without the first one of each row, which causal language models do not predict."""


@dataclass(frozen=True)
class _SeenForward:
    """What a process notes of one forward; None where it is not known, or says nothing."""

    inputs: str | None = None
    """A digest of its inputs, if no loader of ours has given them."""
    labels: "tuple[_SeenLabels, ...]" = ()
    """Each of its arguments that may be labels, if the loss divides by their number."""
    num_items: float | None = None
    """What the loss is to be divided by instead."""


class FirstSteps:
    """What this process's forwards of the first steps were called with.

    Args:
        model: The model.
        gather: A collective that returns what each process passes.
        to_host: Copies tensors to the host; returns None where that would be more than a transfer.
        weighs_own: Whether the loss of each process is a mean over its own labels.
    """

    def __init__(
        self, model: nn.Module, gather: Callable[[Any], list[Any]], to_host: ToHost, *, weighs_own: bool = True
    ) -> None:
        self._name = type(model).__name__
        self._weighs_own = weighs_own
        self._gather = gather
        self._to_host = to_host
        self._left = _STEPS
        self._num_delivered = _batches.num_delivered
        self._seen: list[_SeenForward] = []
        self._reads_ours = False
        """Whether a loader of ours has given a batch for this step: what is made beside it, as noise, may be alike."""

    def see(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Record what a forward in training is called with.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        if len(self._seen) == _FORWARDS:
            return
        self._reads_ours |= _batches.num_delivered > self._num_delivered
        self._num_delivered = _batches.num_delivered
        inputs = None if self._reads_ours else self._digest((args, dict(kwargs)))
        if are_weighed() or not self._weighs_own:
            self._seen.append(_SeenForward(inputs))
        elif kwargs.get("num_items_in_batch") is not None:
            self._seen.append(_SeenForward(inputs, num_items=self._num_items(kwargs["num_items_in_batch"])))
        else:
            self._seen.append(_SeenForward(inputs, labels=tuple(self._labels_in(args, kwargs))))

    def compare(self) -> bool:
        """Compare a step's forwards, once they are over, and warn. Collective: every process.

        Returns:
            Whether that was the last step to look at.
        """
        seen = [replace(each, inputs=None) for each in self._seen] if self._reads_ours else self._seen
        self._seen, self._reads_ours = [], False
        found: list[list[_SeenForward]] = self._gather(seen)
        forwards = list(zip(*found, strict=False))
        said = self._judge_inputs(forwards) or next(filter(None, map(self._judge_labels, forwards)), None)
        if said is not None:
            _log.warning("%s", said)
        self._left = 0 if said is not None else self._left - 1
        return not self._left

    def _judge_inputs(self, forwards: Sequence[tuple[_SeenForward, ...]]) -> str | None:
        """Return what to warn of where all forwards of a step were called with the same inputs on all processes.

        Where only some were, as with the boundary points of a physical model, the others have rows of their own.

        Args:
            forwards: What the processes have noted of each forward, by rank.
        """
        inputs = [{each.inputs for each in forward} for forward in forwards]
        if not inputs or any(len(found) > 1 or None in found for found in inputs):
            return None
        return (
            f"all {len(forwards[0])} processes have called the model {self._name} with the same inputs, and no loader "
            "of torchacc has given them: each device trains on the same rows. Hand the loader over, which deals "
            "its batches out, model, loader = torchacc.accelerate(model, loader, config); or let each process read "
            "rows of its own, as by a DistributedSampler, and draw random inputs of its own, after "
            "torch.manual_seed(seed + torchacc.dist.rank())"
        )

    def _judge_labels(self, forward: tuple[_SeenForward, ...]) -> str | None:
        """Return what to warn of where the processes divide the loss of a forward by numbers of their own."""
        for seen in zip(*(each.labels for each in forward), strict=False):
            counts = [each.num_counted for each in seen]
            if any(each.are_labels for each in seen) and _differ(counts) and _differ([e.num_predicted for e in seen]):
                return (
                    f"the labels of a batch that are not -100 are {_listed(counts)} on the ranks, and the loss of each "
                    "is a mean over its own: the mean of these means is not the loss of the batch of all devices, and "
                    f"its gradients are others. {_DIVIDE}"
                )
        items = [each.num_items for each in forward]
        if _differ(items):
            return (
                f"num_items_in_batch is {_listed(items)} on the ranks, and each divides its loss by its own: the mean "
                f"of these losses is not that of the batch of all devices, and its gradients are others. {_DIVIDE}"
            )
        return None

    def _digest(self, inputs: Any) -> str | None:
        tensors = tensors_in(inputs)
        hosted = self._to_host([tensor.detach() for tensor in tensors]) if tensors else None
        return None if hosted is None else digest_of(hosted)

    def _labels_in(self, args: Any, kwargs: Mapping[str, Any]) -> Iterator[_SeenLabels]:
        """Yield what a model is called with that may be labels, under whatever name.

        Of a number beside labels that are not called so nothing is known: the loss may be divided by it.
        """
        named, values = kwargs.get("labels"), [*args, *kwargs.values()]
        is_named = isinstance(named, torch.Tensor)
        candidates: list[torch.Tensor] = []
        if isinstance(named, torch.Tensor):
            candidates = [named] if named.dim() == 2 and not named.is_floating_point() else []
        elif not any(map(_is_number, values)):
            candidates = [each for each in tensors_in(values) if each.dtype == torch.int64 and each.dim()]
        hosted = self._to_host([each.detach() for each in candidates]) if candidates else None
        for tensor in hosted or ():
            counted = tensor.ne(IGNORE_INDEX)
            predicted = counted[:, 1:] if counted.dim() == 2 else counted
            yield _SeenLabels(is_named or not bool(counted.all()), int(counted.sum()), int(predicted.sum()))

    def _num_items(self, items: Any) -> float | None:
        if not isinstance(items, torch.Tensor):
            return float(items) if isinstance(items, (int, float)) else None
        hosted = self._to_host([items.detach()]) if items.numel() == 1 else None
        return None if hosted is None else float(hosted[0])


_DIVIDE = (
    "Count the step's labels that are not -100, sum the counts of all devices by torchacc.dist.all_gather(), divide by "
    "the number of devices, and pass it: model(**batch, num_items_in_batch=…)"
)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _differ(values: list[Any]) -> bool:
    return None not in values and len(set(values)) > 1


def _listed(values: list[Any]) -> str:
    return ", ".join(f"{value:g}" for value in values)
