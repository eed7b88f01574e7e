"""Build transformers' attention masks without reading from the device, for which a step would wait.

Transformers asks whether several documents lie in a row, by looking at the values of the position ids, and whether
anything is padded. What the answer depends on is known without a look at values: position ids that no data goes into,
such as the range that a model makes where it is given none, are a constant of the recorded program. All others may
begin anew in a row, and get the mask that keeps documents apart, which is right for either. So it does not matter who
made the position ids, nor how they came into the model.

A mask remembers the numbers of the documents where it hides those of others, and later tokens, and nothing else: a
kernel of attention may take them in its place.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from torchacc.engines.patches.versions import is_for_installed
from torchacc.engines.xla import runtime

_DOCUMENTS = "_torchacc_documents"
"""The attribute with the numbers of documents: of a function that makes a mask, and of a mask, with its version."""
_ATTENTION = "sdpa"
"""Whose masks remember them, in `transformers.masking_utils`."""

_constants: dict[bytes, bool] = {}
"""Whether position ids that are a constant of the program are a plain range, by the hash of their operations."""
_shapes: set[tuple[Any, ...]] = set()
"""Shapes and dtypes whose usual ranges `_constants` has."""


class Answers:
    """Answers given while a part of a model ran, to be repeated when it is recomputed in backward.

    There the position ids may be another tensor, behind a barrier, and a mask in place of none would be another
    computation than the one that is repeated.
    """

    def __init__(self) -> None:
        self._given: list[bool] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager in which answers are noted."""
        _noting.append(self._given)
        try:
            yield
        finally:
            _noting.pop()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Context manager in which they are given again, in their order."""
        _repeating.append(iter(self._given))
        try:
            yield
        finally:
            _repeating.pop()


_noting: list[list[bool]] = []
_repeating: list[Iterator[bool]] = []


def documents_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the number of each token's document, (samples, tokens), where a mask hides all else and later tokens.

    Returns:
        None where the mask is another one, or it is not known.
    """
    documents, version = getattr(mask, _DOCUMENTS, (None, None))
    return documents if mask is not None and mask._version == version else None  # not of one that was written to


@contextmanager
def without_questions() -> Iterator[None]:
    """Context manager in which transformers builds masks without waiting for the device."""
    masking_utils = sys.modules.get("transformers.masking_utils")  # which a model of transformers has imported
    if masking_utils is None or not is_for_installed("transformers_masks"):
        yield
        return
    with ExitStack() as stack:
        for name, replace in _REPLACEMENTS.items():
            original = getattr(masking_utils, name, None)
            if original is not None:
                setattr(masking_utils, name, replace(original))
                stack.callback(setattr, masking_utils, name, original)
        masks = masking_utils.AttentionMaskInterface._global_mapping
        original = masks[_ATTENTION]
        masks[_ATTENTION] = _remembering(original)
        stack.callback(masks.__setitem__, _ATTENTION, original)
        yield


def _packed_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Number the documents of each row where there may be several."""

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        if position_ids.device.type != "xla":
            indices: torch.Tensor | None = original(position_ids)
            return indices
        return _document_numbers(position_ids) if _may_be_packed(position_ids) else None

    return find


def _keep_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Count positions from 0, as transformers does, where it turns out on the device that no row has two documents.

    It matters to attention in chunks alone, whose borders are at multiples of the positions.
    """

    def remap(mask_function: Any, position_ids: torch.Tensor) -> Any:
        if position_ids.device.type == "xla":
            plain = torch.arange(position_ids.shape[-1], device=position_ids.device, dtype=position_ids.dtype)
            is_alone = (_document_numbers(position_ids)[:, -1] == 0).all()
            position_ids = torch.where(is_alone, plain, position_ids)
        return original(mask_function, position_ids)

    return remap


def _never_skipped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Build the mask of tokens that may be padding, which is right if none is."""

    def all_kept(tensor: torch.Tensor) -> Any:
        return original(tensor) if tensor.device.type != "xla" else False

    return all_kept


def _skipped_without_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    def may_skip(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        on_device = padding_mask is not None and padding_mask.device.type == "xla"
        return not on_device and original(padding_mask, *args, **kwargs)

    return may_skip


def _with_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record the documents on the function that makes the mask, where it makes a causal one of each."""

    def combine(mask_function: Any, position_ids: torch.Tensor, documents: torch.Tensor) -> Any:
        combined = original(mask_function, position_ids, documents)
        if mask_function is sys.modules["transformers.masking_utils"].causal_mask_function:
            setattr(combined, _DOCUMENTS, documents)
        return combined

    return combine


def _remembering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Attach to the mask what the function that makes it does, if nothing is padded."""

    def make(*args: Any, **kwargs: Any) -> Any:
        mask = original(*args, **kwargs)
        documents = getattr(kwargs.get("mask_function"), _DOCUMENTS, None)
        if mask is not None and documents is not None and kwargs.get("attention_mask") is None:
            setattr(mask, _DOCUMENTS, (documents, mask._version))
        return mask

    return make


_REPLACEMENTS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "find_packed_sequence_indices": _packed_indices,
    "packed_sequence_compatibility_function": _with_documents,
    "remap_positions_for_packed_sequence": _keep_apart,
    "fast_all": _never_skipped,
    "_ignore_bidirectional_mask_sdpa": _skipped_without_padding,
}
"""Functions of `transformers.masking_utils`, by name: not every version has all."""


def _document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's document in its row: one begins where positions do not go on by 1."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def _may_be_packed(position_ids: torch.Tensor) -> bool:
    answer = next(_repeating[-1], None) if _repeating else None
    if answer is None:
        answer = not _is_plain_range(position_ids)
    for given in _noting:
        given.append(answer)
    return answer


def _is_plain_range(position_ids: torch.Tensor) -> bool:
    """Return whether position ids go on by 1 in each row whatever the data are; takes microseconds."""
    from torch_xla import _XLAC

    _, data = _XLAC._get_tensors_xla_device_data_node([position_ids])
    if data:
        return False
    _know_usual_ranges(position_ids)
    operations = _XLAC._get_graph_hash([position_ids])
    if operations not in _constants:
        # Of a copy: its values are data from here on, and the position ids stay a constant of the step's program.
        (values,) = runtime.to_host([position_ids.clone()])
        _constants[operations] = bool((torch.diff(values, dim=-1) == 1).all())
    return _constants[operations]


def _know_usual_ranges(like: torch.Tensor) -> None:
    """Recognise the ranges that models make themselves, without running a program."""
    from torch_xla import _XLAC

    if (key := (like.shape, like.dtype)) in _shapes:
        return
    _shapes.add(key)
    plain = torch.arange(like.shape[-1], device=like.device, dtype=like.dtype)
    for row in (plain, plain + 0):
        for usual in (row.unsqueeze(0), row.unsqueeze(0).expand(like.shape)):
            _constants[_XLAC._get_graph_hash([usual])] = True
