"""Turns documents into tokens, and keeps tokens in files that are mapped into memory, not read."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from torchacc.errors import DataError, in_one_line, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"

Tokens = NDArray[Any]


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE tokenizer, to which no text is unknown.

    Args:
        documents: What to learn from.
        vocab_size: How many tokens to have at most, of which one ends a document.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(documents, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a folder or the hub.

    Raises:
        DataError: There is none, or it has no end-of-text token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            Path(name).expanduser() if name.startswith("~") else name, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"data.tokenizer = {shown(name)}: there is no tokenizer that can be loaded ({in_one_line(error)}); "
            "name the folder or the hub id of one, or leave it out to train one on the text"
        ) from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"data.tokenizer = {shown(name)}: it has no end-of-text token, with which documents end; save it with its "
            "`eos_token` set, or choose another"
        )
    return tokenizer


def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return what differs between tokenizers that may give different tokens."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    facts = repr((type(tokenizer).__name__, rules, tokenizer.bos_token_id, tokenizer.eos_token_id))
    return hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()


def tokenise(texts: Sequence[str], *, tokenizer: "PreTrainedTokenizerBase") -> dict[str, list[list[int]]]:
    """Turn documents into tokens.

    Returns:
        Under "tokens" those of each document, which begin with the tokenizer's beginning-of-text token where that is
        another than its end-of-text token, with which they end.
    """
    begin = [] if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else [tokenizer.bos_token_id]
    encoded = tokenizer(
        [text or "" for text in texts], add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    end = [tokenizer.eos_token_id]
    return {"tokens": [[*begin, *ids, *end] for ids in encoded["input_ids"]]}


class TokenWriter:
    """Writes documents one after the other into a folder, which `load_tokens` reads.

    Args:
        folder: Made here.
        vocab_size: Above all token ids.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        self._file = (folder / f"tokens.{self._dtype}").open("wb")
        self._sizes: list[int] = []

    def add(self, tokens: Tokens) -> None:
        """Write a document, unless it has no token."""
        if len(tokens):
            self._file.write(tokens.astype(self._dtype).tobytes())
            self._sizes.append(len(tokens))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        starts = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)]).astype(np.int64)
        with self._file, (self._folder / "starts.npy").open("wb") as file:
            np.save(file, starts)
            for written in (self._file, file):
                written.flush()
                os.fsync(written.fileno())  # before the folder gets its name


def load_tokens(folder: Path) -> tuple[Tokens, Tokens]:
    """Map what a `TokenWriter` has written.

    Returns:
        All tokens, (num_tokens,), and where documents start in them, (num_documents + 1,), the last entry their number.
    """
    starts = np.load(folder / "starts.npy")
    (path,) = folder.glob("tokens.*")
    num_tokens = int(starts[-1])
    if not num_tokens:  # an empty file cannot be mapped
        return np.empty(0, dtype=path.suffix[1:]), starts
    return np.memmap(path, dtype=path.suffix[1:], mode="r", shape=(num_tokens,)), starts


def is_held_out(index: int, share: float) -> bool:
    """Tell whether a document is kept for validation: that share of them, evenly spread."""
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)
