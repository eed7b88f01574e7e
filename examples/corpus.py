"""Text for the examples, as blocks of tokens: Python's own standard library, or WikiText-2 from the hub.

The standard library is on every machine that runs the examples, so the default needs no download. Nothing here is
cached or shared: every process computes the same corpus in a few seconds, and reads the same files in the same order.
"""

import re
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from torchacc.train.corpus import stdlib_documents
from torchacc.train.tokens import train_tokenizer

SMALL_VOCAB_SIZE = 4096
HELD_OUT_EVERY = 20  # every 20th file of the standard library is kept for evaluation


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and two texts in its tokens; no document is in both."""

    tokenizer: PreTrainedTokenizerBase
    train: torch.Tensor
    """Token ids to learn from, (num_tokens,)."""
    held_out: torch.Tensor
    """Token ids of documents that training never sees, (num_tokens,)."""

    @property
    def unigram_entropy(self) -> float:
        """The loss, in nats, of the best model that knows how often each token occurs and nothing else."""
        counts = torch.bincount(self.train).double()
        probabilities = counts[counts > 0] / counts.sum()
        return -(probabilities * probabilities.log()).sum().item()


def load_corpus(dataset: str, model: str, files: int | None = None) -> Corpus:
    """Read a dataset's documents and turn them into tokens.

    Args:
        dataset: "stdlib", or "wikitext" from the hub.
        model: The model on the hub whose tokenizer to use, or "small" to train one on the documents.
        files: How many files of the standard library to read at most; all of them without.
    """
    train, held_out = _stdlib_documents(files) if dataset == "stdlib" else _wikitext_documents()
    tokenizer = train_tokenizer(train, SMALL_VOCAB_SIZE) if model == "small" else AutoTokenizer.from_pretrained(model)
    return Corpus(tokenizer, _tokenize(tokenizer, train), _tokenize(tokenizer, held_out))


def blocks_of(tokens: torch.Tensor, length: int, *, limit: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Cut tokens into examples of `length` tokens, as a causal language model takes them.

    Args:
        tokens: Token ids, (num_tokens,).
        length: Tokens in an example.
        limit: Return at most this many, spread evenly over the text.
    """
    blocks = tokens[: len(tokens) // length * length].view(-1, length)  # (num_blocks, length)
    if limit is not None:
        blocks = blocks[torch.linspace(0, len(blocks) - 1, min(limit, len(blocks))).long()]
    return [{"input_ids": block, "labels": block} for block in blocks]


def _stdlib_documents(files: int | None) -> tuple[list[str], list[str]]:
    if files is not None and files < HELD_OUT_EVERY:
        raise SystemExit(f"--files {files}: every {HELD_OUT_EVERY}th file is held out; give {HELD_OUT_EVERY} or more")
    documents = stdlib_documents()[:files]
    held_out = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return documents, held_out


def _wikitext_documents() -> tuple[list[str], list[str]]:
    from datasets import load_dataset  # slow to import, and the default does without it

    def articles(split: str) -> list[str]:
        text = "".join(load_dataset("wikitext", "wikitext-2-raw-v1", split=split)["text"])
        return re.split(r"(?m)^(?= = [^=])", text)  # an article starts with a line " = Title = "

    return articles("train"), articles("validation")


def _tokenize(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> torch.Tensor:
    encoded = tokenizer(documents, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])
