"""Cuts documents of tokens into examples of one fixed shape."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from torchacc.errors import DataError
from torchacc.train.tokens import load_tokens

IGNORED = -100
"""The label of a position that nothing is learned from."""

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
            keeps to one document, and its first token is no target of the document before.

    Returns:
        `input_ids`, `labels` and, where documents are apart, `position_ids`, each (block_size,) and int64. A model
        compares its output at one position with the label at the next.
    """
    num_tokens = len(tokens)
    input_ids = np.full(block_size, pad_id, dtype=np.int64)
    labels = np.full(block_size, IGNORED, dtype=np.int64)
    input_ids[:num_tokens] = labels[:num_tokens] = tokens
    block = {"input_ids": input_ids, "labels": labels}
    if isolate:
        labels[starts] = IGNORED
        begins = np.zeros(block_size, dtype=np.int64)
        begins[starts] = starts
        begins[num_tokens:] = num_tokens  # what is padded is a document of its own
        block["position_ids"] = np.arange(block_size) - np.maximum.accumulate(begins)
    return {name: torch.from_numpy(values) for name, values in block.items()}


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """Examples cut from tokens on disk, which are mapped, not read; fit for `DataLoader(shuffle=True)`.

    Every token is in exactly one example, and examples do not overlap.

    Args:
        folder: Where `write_tokens` wrote them.
        block_size: Tokens in an example.
        packing: True packs documents one after the other and keeps them apart; "concat" packs them without keeping
            them apart; False starts each document in an example of its own.
        pad_id: The token that fills the last example, or, without packing, the last of each document.
    """

    def __init__(self, folder: Path, block_size: int, packing: bool | str, pad_id: int) -> None:
        self._arguments = (folder, block_size, packing, pad_id)
        self._block_size, self._packing, self._pad_id = block_size, packing, pad_id
        self._tokens, self._starts = load_tokens(folder)
        sizes = np.diff(self._starts) if packing is False else self._starts[-1:]
        self._first_blocks = np.concatenate([[0], np.cumsum(-(-sizes // block_size))])
        """The index of the first block of each run of tokens that starts in a block of its own, and their number."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all examples, padding left out."""
        return len(self._tokens)

    @property
    def num_documents(self) -> int:
        """The number of documents that the examples are cut from."""
        return len(self._starts) - 1

    def __len__(self) -> int:
        return int(self._first_blocks[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        run = int(np.searchsorted(self._first_blocks, index, side="right")) - 1
        run_begin, run_end = (0, len(self._tokens)) if self._packing is not False else self._starts[run : run + 2]
        begin = int(run_begin) + (index - int(self._first_blocks[run])) * self._block_size
        end = min(begin + self._block_size, int(run_end))
        first, last = np.searchsorted(self._starts, [begin, end])
        return make_block(
            self._tokens[begin:end],
            self._starts[first:last] - begin,
            self._block_size,
            pad_id=self._pad_id,
            isolate=self._packing is True,
        )

    def __reduce__(self) -> tuple[type["Blocks"], tuple[Any, ...]]:
        return Blocks, self._arguments  # a spawned worker maps the file too, instead of being sent its content


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
