"""Tokenizers: trained or loaded, and the tokens that they give for documents."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchacc.errors import DataError, in_one_line, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"


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


def tokenizer_facts(tokenizer: "PreTrainedTokenizerBase") -> tuple[Any, ...]:
    """Return what differs between tokenizers that may give different tokens."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return type(tokenizer).__name__, rules, tokenizer.bos_token_id, tokenizer.eos_token_id


def tokenise(texts: Sequence[str], *, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Turn documents into tokens.

    Returns:
        Those of each document, which begin with the tokenizer's beginning-of-text token where that is another than its
        end-of-text token, with which they end.
    """
    if not texts:
        return []
    begin = [] if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else [tokenizer.bos_token_id]
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
    return [[*begin, *ids, tokenizer.eos_token_id] for ids in encoded["input_ids"]]
