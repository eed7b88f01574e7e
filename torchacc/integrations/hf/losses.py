"""Find out what a loss is the mean of, to weigh each device's loss in the mean over all devices."""

import math
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import _is_peft_model

from torchacc.data import tree
from torchacc.parallel.sequence_split import IGNORE_INDEX

LossOf = Callable[[dict[str, Any], float], float]
"""Returns this process's own loss of inputs, given a number of items. Collective."""
Agree = Callable[[Any], list[Any]]
"""Returns what each process passed. Collective."""


class MeanOf(Enum):
    """What the loss of a batch is the mean of."""

    STEP = auto()
    """All labels of a step: it is a sum, divided by the number of items that is passed."""
    LABELS = auto()
    """The batch's labels that are not -100."""
    NEXT_LABELS = auto()
    """The same without the first of each row, which nothing predicts."""
    ROWS = auto()
    """The batch's rows."""
    UNKNOWN = auto()
    """Something else."""

    @property
    def is_of_labels(self) -> bool:
        """Whether it is a mean over the labels of one batch."""
        return self in (MeanOf.LABELS, MeanOf.NEXT_LABELS)

    @property
    def ignores_masked(self) -> bool:
        """Whether rows whose labels are all -100 do not count."""
        return self is MeanOf.STEP or self.is_of_labels

    def count(self, labels: torch.Tensor) -> torch.Tensor:
        """Return how many labels count."""
        counted = labels[..., 1:] if self is MeanOf.NEXT_LABELS else labels
        return counted.ne(IGNORE_INDEX).sum()


def are_classes(labels: Any) -> bool:
    """Tell whether labels are classes, one for each row or for each place of a sequence."""
    return torch.is_tensor(labels) and not labels.is_floating_point() and labels.dim() in (1, 2)


def find_mean(loss_of: LossOf, inputs: dict[str, Any], label_names: Sequence[str], agree: Agree) -> MeanOf:
    """Find out by trying what a loss is the mean of. Collective: every process, with inputs of its own.

    Args:
        loss_of: The loss, which draws no random numbers.
        inputs: A batch.
        label_names: Which of its keys are labels.
        agree: Exchanges what the processes find, as each of them has to try as much as the others.
    """
    names = [name for name in (*label_names, "shift_labels") if name in inputs]
    labels = inputs.get("labels")
    if torch.is_tensor(labels) and not labels.is_floating_point():
        inputs = {**inputs, "labels": labels.masked_fill(labels == IGNORE_INDEX, 0)}  # any class will do
    full = loss_of(inputs, 1.0)
    if "labels" in inputs:
        kind = _sum_divided(full, loss_of(inputs, 2.0), loss_of(inputs, 4.0))
        if _first_found_by_all([kind], agree) is MeanOf.STEP:
            return MeanOf.STEP
    if ("labels" in names and len(names) > 1) or not all(torch.is_tensor(inputs[name]) for name in names):
        return MeanOf.UNKNOWN
    found = _label_means if are_classes(labels) else _row_means
    return _first_found_by_all(found(full, loss_of, inputs), agree)


def _first_found_by_all(found: list[MeanOf], agree: Agree) -> MeanOf:
    """Return the first kind of mean that all processes have found possible."""
    first, *others = agree(found)
    return next((kind for kind in first if all(kind in other for other in others)), MeanOf.UNKNOWN)


def _sum_divided(by_1: float, by_2: float, by_4: float) -> MeanOf:
    """Tell a sum by what it is when it is divided; some models add to it what is not, as to balance experts."""
    difference = by_1 - by_2
    is_sum = difference != 0 and math.isclose(difference, 2 * (by_2 - by_4), rel_tol=1e-4)
    return MeanOf.STEP if is_sum else MeanOf.UNKNOWN


def _label_means(full: float, loss_of: LossOf, inputs: dict[str, Any]) -> list[MeanOf]:
    """Return of which labels the loss can be the mean, by those of two parts which rows share unequally."""
    labels = inputs["labels"]
    is_sequence = labels.dim() > 1 and labels.shape[1] > 1
    grid = labels if is_sequence else labels.reshape(1, -1)
    is_first = torch.zeros_like(grid, dtype=torch.bool)
    is_first[:, 0] = True
    in_part = is_first.clone()
    in_part[0, : grid.shape[1] // 2 + is_sequence] = True
    masked = [labels.masked_fill(~chosen.view_as(labels), IGNORE_INDEX) for chosen in (is_first, in_part, ~in_part)]
    of_first, *of_parts = [loss_of({**inputs, "labels": part}, 1.0) for part in masked]
    counts_first = math.isfinite(of_first) and of_first != 0
    kind = MeanOf.LABELS if counts_first or not is_sequence else MeanOf.NEXT_LABELS
    counts = [int(kind.count(part)) for part in masked[1:]]
    if not all(counts):
        return [MeanOf.LABELS, MeanOf.NEXT_LABELS]  # too few to tell
    return [kind] if _is_mean(full, of_parts, counts) else [MeanOf.UNKNOWN]


def _row_means(full: float, loss_of: LossOf, inputs: dict[str, Any]) -> list[MeanOf]:
    num_rows = tree.num_rows(inputs)
    if num_rows is None:
        return [MeanOf.UNKNOWN]
    if num_rows == 1:
        return [MeanOf.ROWS]
    cut = max(num_rows // 3, 1)
    parts = [rows_of(inputs, slice(cut)), rows_of(inputs, slice(cut, None))]
    is_mean = _is_mean(full, [loss_of(part, 1.0) for part in parts], [cut, num_rows - cut])
    return [MeanOf.ROWS if is_mean else MeanOf.UNKNOWN]


def _is_mean(full: float, of_parts: list[float], counts: list[int]) -> bool:
    total = sum(loss * count for loss, count in zip(of_parts, counts, strict=True))
    return math.isclose(full, total / sum(counts), rel_tol=1e-4)


def rows_of(inputs: Any, rows: slice) -> Any:
    """Return some rows of inputs that all have one for each sample."""
    return tree.map_tensors(lambda tensor: tensor[rows] if tensor.dim() else tensor, inputs)


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class, or that of the model that adapters are in."""
    inner: Any = model
    return type(inner.base_model.model if _is_peft_model(model) else model).__name__


class Smoother(LabelSmoother):  # type: ignore[misc]
    """transformers' label smoothing, which decides once whether labels are those of the next tokens.

    transformers asks the name of the model's class each time, which FSDP2 changes.
    """

    def __init__(self, epsilon: float, name: str) -> None:
        super().__init__(epsilon)
        self._shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def __call__(
        self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the smoothed loss."""
        return super().__call__(  # type: ignore[no-any-return]
            model_output, labels, shift_labels=self._shifts, num_items_in_batch=num_items_in_batch
        )
