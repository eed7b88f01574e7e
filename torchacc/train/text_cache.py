"""Keeps a text as tokens on disk, so that it is read and tokenised once on each machine."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchacc.errors import DataError
from torchacc.logging import get_logger
from torchacc.train.config import TextConfig
from torchacc.train.sources import Source, cache_folder, check_cache, check_column, has_text
from torchacc.train.tokens import Tokens, TokenWriter, is_held_out, tokenise, tokenizer_digest, train_tokenizer

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_log = get_logger(__name__)

_FORMAT = 1
"""Of the files: raised when the same configuration comes to mean other tokens."""
_QUIET_SECS = 2.0
"""How long another process may prepare the same text before that is worth a line."""
_BATCH = 200
_PARTS = ("scratch", "tokenizer", "train", "validation")
"""Folders that a folder of tokens is made of, the first of them only while it is."""


def prepare(
    config: TextConfig, source: Source, validation: Source | None, tokenizer: "PreTrainedTokenizerBase | None"
) -> Path:
    """Return the folder of a text's tokens, made now unless it is there.

    Of several processes one makes it, and the others wait. It gets its name when it is whole, so that one that was
    killed leaves nothing that is taken for it.

    Args:
        config: The text; the block size, the packing and the order have no influence on its tokens.
        source: What to learn from.
        validation: What to validate on; None to hold out a share of the above.
        tokenizer: The tokenizer; None to train one.

    Returns:
        A folder with `train` and `validation`, for `load_tokens`, and `tokenizer`.

    Raises:
        DataError: The text cannot be read, or there is none; or the folder for its tokens cannot be made.
    """
    cache = cache_folder(config)
    check_cache(cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"data.cache_dir: {cache} cannot be made: {error}; name another folder") from None
    key = _key(config, source, validation, tokenizer)
    folder = cache / key
    if folder.is_dir():
        return folder
    with _locked(cache / f"{key}.lock"):
        if not folder.is_dir():
            _log.info("tokenising %s into %s", source, folder)
            unfinished = cache / f"{key}.unfinished"
            _clear(unfinished)  # of a process that was killed
            try:
                _build(unfinished, config, source, validation, tokenizer)
                if _key(config, source, validation, tokenizer) != key:
                    raise DataError(f"data: {source} has changed while it was read; start again when it is complete")
                os.replace(unfinished, folder)
            finally:
                _clear(unfinished)
    return folder


def _clear(unfinished: Path) -> None:
    """Remove what `_build()` has made of a folder, and nothing else in it."""
    for name in _PARTS:
        shutil.rmtree(unfinished / name, ignore_errors=True)
    with suppress(OSError):
        unfinished.rmdir()


def _key(
    config: TextConfig, source: Source, validation: Source | None, tokenizer: "PreTrainedTokenizerBase | None"
) -> str:
    """Return a name for all that the tokens depend on."""
    facts = {
        "format": _FORMAT,
        "source": source.facts(),
        "column": config.text_column,
        "validation": config.validation_share if validation is None else validation.facts(),
        "tokenizer": config.vocab_size if tokenizer is None else tokenizer_digest(tokenizer),
        "versions": [version("tokenizers"), version("transformers")],
    }
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=_QUIET_SECS)
    except Timeout:
        _log.info("waiting for another process, which tokenises the same text")
        lock.acquire()
    except OSError as error:
        raise DataError(f"data.cache_dir: {path.parent} cannot be written: {error}; name another folder") from None
    try:
        yield
    finally:
        lock.release()


def _build(
    folder: Path,
    config: TextConfig,
    source: Source,
    validation: Source | None,
    tokenizer: "PreTrainedTokenizerBase | None",
) -> None:
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    documents = _read(source, config, scratch)
    share = config.validation_share if validation is None else 0.0
    held_out = _held_out(len(documents), share)
    if tokenizer is None:
        texts = (row[config.text_column] for index, row in enumerate(documents) if index not in held_out)
        tokenizer = train_tokenizer(texts, config.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    with (
        TokenWriter(folder / "train", len(tokenizer)) as train,
        TokenWriter(folder / "validation", len(tokenizer)) as val,
    ):
        for index, tokens in enumerate(_tokenised(documents, config, tokenizer, scratch)):
            begin = 0 if index in held_out else len(tokens)
            if len(documents) == 1:  # it is cut, and its end held out
                begin -= round(len(tokens) * share)
            train.add(tokens[:begin])
            val.add(tokens[begin:])
        if validation is not None:
            for tokens in _tokenised(_read(validation, config, scratch), config, tokenizer, scratch):
                val.add(tokens)
    shutil.rmtree(scratch)


def _read(source: Source, config: TextConfig, scratch: Path) -> "datasets.Dataset":
    """Read the documents that have text."""
    rows = source.read(scratch)
    check_column(rows, config.text_column, source)
    documents = rows.select_columns([config.text_column]).filter(
        partial(_have_text, column=config.text_column, source=source),
        input_columns=config.text_column,
        with_indices=True,
        batched=True,
        keep_in_memory=True,
        load_from_cache_file=False,
        desc="reading",
    )
    if not len(documents):
        raise DataError(f"data: {source} has no text in its column {config.text_column!r}")
    return documents


def _have_text(texts: Sequence[Any], indices: Sequence[int], column: str, source: Source) -> list[bool]:
    return [has_text(text, column, source, index) for text, index in zip(texts, indices, strict=True)]


def _held_out(num_documents: int, share: float) -> set[int]:
    """Choose the documents that are for validation: at least one, if any."""
    chosen = {index for index in range(num_documents) if is_held_out(index, share)}
    return chosen or ({num_documents - 1} if share and num_documents > 1 else set())


def _tokenised(
    documents: "datasets.Dataset", config: TextConfig, tokenizer: "PreTrainedTokenizerBase", scratch: Path
) -> Iterator[Tokens]:
    """Yield the tokens of each document."""
    import datasets

    tokenised = documents.map(
        partial(tokenise, tokenizer=tokenizer),
        input_columns=config.text_column,
        batched=True,
        batch_size=_BATCH,
        remove_columns=documents.column_names,
        features=datasets.Features({"tokens": datasets.List(datasets.Value("int32"))}),
        num_proc=config.num_proc,
        cache_file_name=str(scratch / "tokens.arrow"),
        load_from_cache_file=False,
        new_fingerprint="tokens",  # else a digest of the pickled tokenizer
        desc="tokenising",
    )
    for table in tokenised.with_format("arrow").iter(_BATCH):
        column = table["tokens"].combine_chunks()
        yield from np.split(column.flatten().to_numpy(), np.cumsum(column.value_lengths())[:-1])
