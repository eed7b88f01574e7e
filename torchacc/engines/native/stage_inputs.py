"""What a model in stages may be called with, as it is known what each input is to a stage."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchacc.data import digest_of, tensors_in
from torchacc.engines.forward_inputs import CACHES
from torchacc.engines.native.stage_collectives import StageLink
from torchacc.errors import DataError, EngineError
from torchacc.parallel.sequence_split import IGNORE_INDEX, next_labels

SPLIT_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
"""Inputs with a row for each sample; one with a single row, or without rows, is for all of them."""
OF_LOSS = ("labels", "shift_labels")
_OTHERS = ("num_items_in_batch", "use_cache")
_NUM_COMPARED = 2
"""Number of first forwards, in training and in evaluation each, whose inputs are compared between stages."""
_ASKED_FOR = ("logits_to_keep", "output_attentions", "output_hidden_states")
"""Inputs that ask for another output, which are taken where they do not."""


def check(given: dict[str, Any], refuse: Callable[..., EngineError]) -> None:
    """Refuse inputs of which it is not known what they are to a stage.

    Args:
        given: The inputs by name, of which those go that ask for nothing.
        refuse: Makes the error from what is refused, and whether it is a cache, as `generate()` passes one.

    Raises:
        EngineError: There is one, or gradients are recorded of a call without labels.
    """
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not len(ids):
        raise refuse("a call without input_ids of shape (rows, tokens)")
    for name in _ASKED_FOR:
        if isinstance(given.get(name), bool | int) and not given[name]:
            given.pop(name)
    for name, value in given.items():
        if name not in (*SPLIT_INPUTS, *_OTHERS):
            raise refuse(f"the input {name!r}", is_cache=name in CACHES)
        if name in SPLIT_INPUTS and not isinstance(value, torch.Tensor):
            raise refuse(f"{name} that is a {type(value).__name__}")
        if name in OF_LOSS and value.shape != ids.shape:
            raise refuse(f"{name} of shape {tuple(value.shape)} for input_ids of {tuple(ids.shape)}")
    if torch.is_grad_enabled() and "labels" not in given:
        raise EngineError(
            "a call without labels that records gradients, of a model in stages (config.dist.pp.size): only the last "
            "stage has logits, so that the model has to compute the loss. Pass labels, or call it under "
            "torch.no_grad(), where all ranks get the logits"
        )


def num_counted(given: Mapping[str, Any]) -> Any:
    """Return the number by which the sum of a batch's losses is divided; None without labels."""
    if given.get("num_items_in_batch") is not None:
        return given["num_items_in_batch"]
    if "labels" not in given:
        return None
    shifted = given.get("shift_labels")
    return (next_labels(given["labels"]) if shifted is None else shifted).ne(IGNORE_INDEX).sum()


class ComparedInputs:
    """The inputs of a model's first forwards, which are to be the same on all stages."""

    def __init__(self, link: StageLink, model_name: str) -> None:
        self._link, self._model_name = link, model_name
        self._num_left = {True: _NUM_COMPARED, False: _NUM_COMPARED}

    def check(self, given: Mapping[str, Any], *, is_training: bool) -> None:
        """Compare the inputs of a forward with those of the other stages. Collective: all stages.

        Raises:
            DataError: They are others.
        """
        if not self._num_left[is_training]:
            return
        self._num_left[is_training] -= 1
        own = digest_of([sorted(given), *(each.detach().cpu() for each in tensors_in(dict(given)))])
        if not self._link.compare(own):
            raise DataError(
                f"the {self._link.num_devices} devices with stages (config.dist.pp.size) have called "
                f"{self._model_name} with different inputs: a batch runs through all of them. Hand the loader over to "
                "accelerate(), which gives them the same batch, and draw random numbers for it by a generator with "
                "the same seed on all ranks"
            )
