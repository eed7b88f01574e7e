"""Turns documents into tokens once on each machine: by `datasets`, which keeps them as mapped Arrow files."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchacc.errors import DataError
from torchacc.logging import get_logger
from torchacc.train.blocks import held_out_mask
from torchacc.train.config import TextConfig
from torchacc.train.documents import DocumentSource, cache_folder, check_cache
from torchacc.train.tokens import load_tokenizer, tokenise, tokenizer_facts, train_tokenizer

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_log = get_logger(__name__)

_QUIET_SECS = 2.0
"""How long another process may prepare the same text before that is worth a line."""
_BATCH = 200
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""What an Arrow stream ends with; without it, one that is cut off between two batches reads as a shorter one."""


def tokenised_documents(
    config: TextConfig, sources: Sequence[DocumentSource], tokenizer: "PreTrainedTokenizerBase | None"
) -> tuple["PreTrainedTokenizerBase", list["datasets.Dataset"]]:
    """Return the tokens of each source's documents, made now unless they are kept; one process on each machine does it.

    What a killed process leaves is not taken for them: a file gets its name when it is complete.

    Args:
        config: The text; the block size, the packing and the order have no influence on its tokens.
        sources: What to learn from and, where it has its own source, what to validate on.
        tokenizer: The tokenizer; None to train one on the documents that are not held out.

    Returns:
        The tokenizer, and for each source a dataset whose column `tokens` has a row for each document with text.

    Raises:
        DataError: The text cannot be read, or there is none; or the folder for its tokens cannot be written.
    """
    cache = cache_folder(config)
    check_cache(cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        before = [source.state_of_files() for source in sources]
        documents = [source.load(cache) for source in sources]
        for rows, source in zip(documents, sources, strict=True):
            _check_complete(rows, source)
        if tokenizer is None:
            share = config.validation_share if len(sources) == 1 else 0.0
            tokenizer = _trained_tokenizer(documents[0], sources[0], config.vocab_size, share, cache)
        tokenised = [
            _tokenised(rows, source, tokenizer, cache, config.num_proc)
            for rows, source in zip(documents, sources, strict=True)
        ]
    except OSError as error:
        raise DataError(f"data.cache_dir: {cache} cannot be written: {error}; name another folder") from None
    for source, state in zip(sources, before, strict=True):
        if source.state_of_files() != state:
            raise DataError(f"data: {source} has changed while it was read; start again when it is complete")
    return tokenizer, tokenised


def _trained_tokenizer(
    documents: "datasets.Dataset", source: DocumentSource, vocab_size: int, share: float, cache: Path
) -> "PreTrainedTokenizerBase":
    folder = cache / f"tokenizer-{_fingerprint(documents, vocab_size, share)}"
    with _one_process(folder):
        if not folder.is_dir():
            held_out = held_out_mask(sum(1 for _ in _texts(documents, source)), share)
            texts = (text for text, is_out in zip(_texts(documents, source), held_out, strict=True) if not is_out)
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            train_tokenizer(texts, vocab_size).save_pretrained(unfinished)
            unfinished.rename(folder)
    return load_tokenizer(str(folder))


def _texts(documents: "datasets.Dataset", source: DocumentSource) -> Iterator[str]:
    return (text for index, text in enumerate(documents[source.column]) if source.has_text(text, index))


def _tokenised(
    documents: "datasets.Dataset",
    source: DocumentSource,
    tokenizer: "PreTrainedTokenizerBase",
    cache: Path,
    num_proc: int | None,
) -> "datasets.Dataset":
    import datasets

    path = cache / f"tokens-{_fingerprint(documents, tokenizer_facts(tokenizer))}.arrow"
    token = datasets.Value("uint16" if len(tokenizer) <= 2**16 else "uint32")
    with _one_process(path):
        for file in sorted(cache.glob(f"{path.stem}*.arrow")):
            if not _is_complete(file):
                _log.warning("%s is truncated, as a power failure may leave it, and is made again", file)
                file.unlink()
        is_begun = any(cache.glob(f"{path.stem}*.arrow"))
        if not is_begun:
            _log.info("tokenising %s into %s", source, cache)
        tokenised = documents.map(
            partial(_tokenise_rows, source=source, tokenizer=tokenizer),
            input_columns=source.column,
            with_indices=True,
            batched=True,
            batch_size=_BATCH,
            remove_columns=documents.column_names,
            features=datasets.Features({"tokens": datasets.List(token)}),
            num_proc=None if is_begun else num_proc,  # with it `datasets` leaves variables changed
            cache_file_name=str(path),
            load_from_cache_file=True,
            new_fingerprint=path.stem,
            desc="tokenising",
        )
        for file in _files(tokenised):
            with file.open("rb") as written:
                os.fsync(written.fileno())
    if not len(tokenised):
        raise DataError(f"data: {source} has no text in its column {source.column!r}")
    return tokenised


def _tokenise_rows(
    texts: Sequence[Any], indices: Sequence[int], *, source: DocumentSource, tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, list[Any]]:
    rows = [text for text, index in zip(texts, indices, strict=True) if source.has_text(text, index)]
    return {"tokens": [np.asarray(tokens) for tokens in tokenise(rows, tokenizer=tokenizer)]}


def _check_complete(documents: "datasets.Dataset", source: DocumentSource) -> None:
    """Refuse documents of which `datasets` has kept a part only: it would be taken for all of them.

    Raises:
        DataError: A file of them is truncated.
    """
    for file in _files(documents):
        if not _is_complete(file):
            raise DataError(f"data: {source} is kept in {file}, which is truncated: remove {file.parent}")


def _files(rows: "datasets.Dataset") -> list[Path]:
    """Return the Arrow files that a dataset is mapped from."""
    return [Path(file["filename"]) for file in rows.cache_files]


def _is_complete(file: Path) -> bool:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(_END)))
        return stream.read() == _END


def _fingerprint(documents: "datasets.Dataset", *facts: Any) -> str:
    """Return a name for all that tokens depend on.

    `datasets` names by its fingerprint what it derives from a dataset; nothing public tells two versions of one apart.
    The tokenizer is not left to it, as it would pickle the object with its folder's name.
    """
    from datasets.fingerprint import Hasher

    return str(Hasher.hash([documents._fingerprint, *facts, version("tokenizers"), version("transformers")]))


@contextmanager
def _one_process(path: Path) -> Iterator[None]:
    """Context manager that one process at a time is in."""
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=_QUIET_SECS)
    except Timeout:
        _log.info("waiting for another process, which tokenises the same text")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
