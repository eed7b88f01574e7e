"""Cut documents of tokens into examples of one fixed shape."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from torchacc.errors import DataError
from torchacc.parallel.sequence_split import IGNORE_INDEX

if TYPE_CHECKING:
    import datasets

Tokens = NDArray[Any]


def make_block(
    tokens: Tokens, starts: Tokens, block_size: int, *, pad_id: int, isolate: bool
) -> dict[str, torch.Tensor]:
    """Make an example of a run of tokens, padded at its end.

    Args:
        tokens: Token ids, (num_tokens,), at most `block_size`.
        starts: Where documents start in them, ascending.
        block_size: Tokens in an example.
        pad_id: The token to pad with.
        isolate: Whether documents are to be apart: each has positions from 0 on, by which a model's attention mask
            keeps to one document, and its first token is not a target of the document before.

    Returns:
        `input_ids`, `labels` and, where documents are apart, `position_ids`, each (block_size,) and int64. A model
        compares its output at one position with the label at the next.
    """
    num_tokens = len(tokens)
    input_ids = np.full(block_size, pad_id, dtype=np.int64)
    labels = np.full(block_size, IGNORE_INDEX, dtype=np.int64)
    input_ids[:num_tokens] = labels[:num_tokens] = tokens
    block = {"input_ids": input_ids, "labels": labels}
    if isolate:
        labels[starts] = IGNORE_INDEX
        begins = np.zeros(block_size, dtype=np.int64)
        begins[starts] = starts
        begins[num_tokens:] = num_tokens  # what is padded is a document of its own
        block["position_ids"] = np.arange(block_size) - np.maximum.accumulate(begins)
    return {name: torch.from_numpy(values) for name, values in block.items()}


class TokenDocuments:
    """Documents of tokens one after the other, mapped from the Arrow files of a dataset, not read.

    Args:
        tokenised: A dataset whose column `tokens` has a row for each document.
        share: The share of documents that is held out, evenly spread; of a single document it is the end.
        held_out: Whether these are the documents that are held out, or the others.
    """

    def __init__(self, tokenised: "datasets.Dataset", share: float = 0.0, *, held_out: bool = False) -> None:
        self._arguments = (tokenised, share, held_out)
        chunks = tokenised.with_format("arrow")[:]["tokens"].chunks
        offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        ends = np.concatenate([of[1:] for of in offsets])
        begins = np.concatenate([of[:-1] for of in offsets])
        if len(ends) == 1:
            cut = ends - np.round((ends - begins) * share).astype(ends.dtype)
            begins, ends = (cut, ends) if held_out else (begins, cut)
            chosen = ends > begins
        else:
            chosen = held_out_mask(len(ends), share) == held_out
        self._chunks = [chunk.values.to_numpy() for chunk in chunks]
        self._chunk_of = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])[chosen]
        self._begins = begins[chosen]
        self.starts = np.concatenate([[0], np.cumsum((ends - begins)[chosen], dtype=np.int64)])
        """Where each document starts among all tokens, (num_documents + 1,); the last entry is their number."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def read(self, begin: int, end: int) -> Tokens:
        """Return the tokens from one position to another, (end - begin,)."""
        first = int(np.searchsorted(self.starts, begin, side="right")) - 1
        last = int(np.searchsorted(self.starts, end))
        parts = []
        for document in range(first, last):
            start, stop = max(begin, self.starts[document]), min(end, self.starts[document + 1])
            shift = int(self._begins[document]) - self.starts[document]
            parts.append(self._chunks[self._chunk_of[document]][start + shift : stop + shift])
        return np.concatenate(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker maps the files too, instead of being sent their content.
        tokenised, share, held_out = self._arguments
        return partial(TokenDocuments, held_out=held_out), (tokenised, share)


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Examples cut from documents of tokens; fit for `DataLoader(shuffle=True)`.

    Every token is in exactly one example, and examples do not overlap.

    Args:
        documents: What to cut.
        block_size: Tokens in an example.
        packing: True packs documents one after the other and keeps them apart; "concat" packs them without keeping
            them apart; False starts each document in an example of its own.
        pad_id: The token that fills the last example, or, without packing, the last of each document.
    """

    def __init__(self, documents: TokenDocuments, block_size: int, packing: bool | str, pad_id: int) -> None:
        self.documents = documents
        self._block_size, self._packing, self._pad_id = block_size, packing, pad_id
        sizes = np.diff(documents.starts) if packing is False else documents.starts[-1:]
        self._first_blocks = np.concatenate([[0], np.cumsum(-(-sizes // block_size))])
        """The index of the first block of each run of tokens that starts in a block of its own, and their number."""

    def __len__(self) -> int:
        return int(self._first_blocks[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        starts = self.documents.starts
        run = int(np.searchsorted(self._first_blocks, index, side="right")) - 1
        run_begin, run_end = starts[run : run + 2] if self._packing is False else starts[[0, -1]]
        begin = int(run_begin) + (index - int(self._first_blocks[run])) * self._block_size
        end = min(begin + self._block_size, int(run_end))
        first, last = np.searchsorted(starts, [begin, end])
        return make_block(
            self.documents.read(begin, end),
            starts[first:last] - begin,
            self._block_size,
            pad_id=self._pad_id,
            isolate=self._packing is True,
        )

    def __reduce__(self) -> tuple[type["Blocks"], tuple[Any, ...]]:
        return Blocks, (self.documents, self._block_size, self._packing, self._pad_id)


class StreamedBlocks(IterableDataset[dict[str, torch.Tensor]]):
    """Examples packed while documents are read.

    A loader of `shard_loader()` finds its position in them again, by reading up to it.

    Args:
        documents: Returns the documents of an epoch as token ids; its argument decides on their order.
        block_size: Tokens in an example.
        packing: As in `Blocks`.
        pad_id: As in `Blocks`.
        seed: Of the generator that the order of each epoch is drawn from.
    """

    def __init__(
        self,
        documents: Callable[[int], Iterable[Tokens]],
        block_size: int,
        packing: bool | str,
        pad_id: int,
        seed: int,
    ) -> None:
        self._documents = documents
        self._block_size, self._packing, self._pad_id = block_size, packing, pad_id
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        # Not a generator function: the order is drawn when an epoch starts, and so when one is to be found again.
        if get_worker_info() is not None:
            raise DataError(
                "a stream is read by one process, else every worker would give every example; write num_workers=0, or "
                "streaming: false"
            )
        order = int(torch.randint(2**62, (), generator=self.generator))
        return (
            make_block(tokens, starts, self._block_size, pad_id=self._pad_id, isolate=self._packing is True)
            for tokens, starts in self._runs(self._documents(order))
        )

    def _runs(self, documents: Iterable[Tokens]) -> Iterator[tuple[Tokens, Tokens]]:
        """Yield the tokens of each example, and where documents start in them."""
        rest, starts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        for document in documents:
            starts = np.append(starts, len(rest))
            rest = np.concatenate([rest, document])
            while len(rest) >= self._block_size:
                yield rest[: self._block_size], starts[starts < self._block_size]
                rest, starts = rest[self._block_size :], starts[starts >= self._block_size] - self._block_size
            if self._packing is False and len(rest):
                yield rest, starts
                rest, starts = rest[:0], starts[:0]
        if len(rest):
            yield rest, starts


def held_out_mask(num_documents: int, share: float) -> NDArray[np.bool_]:
    """Return which documents are held out: that share, evenly spread, and at least one of two or more if any is."""
    counted = np.floor(np.arange(num_documents + 1) * share + 1e-9)
    mask: NDArray[np.bool_] = np.diff(counted) > 0
    if share and num_documents > 1 and not mask.any():
        mask[-1] = True
    return mask


def is_held_out(index: int, share: float) -> bool:
    """Return whether a document of a stream, whose end is not known, is held out: that share, evenly spread."""
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)
