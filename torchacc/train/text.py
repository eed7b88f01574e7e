"""The text that a stage trains on: read, tokenised once, and cut into blocks."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from torchacc.errors import ConfigError
from torchacc.train.blocks import Blocks, StreamedBlocks, TokenDocuments, Tokens, is_held_out
from torchacc.train.config import TextConfig
from torchacc.train.documents import DocumentSource, find_sources
from torchacc.train.token_cache import tokenised_documents
from torchacc.train.tokens import load_tokenizer, tokenise

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_STREAM_BATCH = 64
_STREAM_BUFFER = 10_000

# Those whose attention, by the tests, keeps to one document of a packed block, which it finds by its positions. Others
# take `position_ids` and look across all the same, such as OPT and Falcon.
PACKING_FAMILIES = frozenset(
    {
        *("apertus", "arcee", "bitnet", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3", "dots1"),
        *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm"),
        *("glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe", "granitemoeshared"),
        *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2", "llama", "llama4_text", "mellum"),
        *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "olmo", "olmo2"),
        *("olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        *("seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma"),
    }
)
_MASKED_ATTENTION = (None, "eager", "sdpa", "flex_attention")


@dataclass(frozen=True)
class TextData:
    """Examples to train on and to validate on, and how they came about.

    An example has `input_ids`, `labels` and, where documents are packed apart, `position_ids`, each (block_size,).
    """

    train: Dataset[Any]
    """Examples to learn from; an `IterableDataset` where they are streamed."""
    validation: Dataset[Any] | None
    """Examples of documents that training never sees."""
    tokenizer: "PreTrainedTokenizerBase"
    """What made the tokens."""


def check_model(config: TextConfig, model_config: "PreTrainedConfig") -> None:
    """Refuse a model that the examples do not fit.

    Args:
        config: The text.
        model_config: The model's configuration, with `use_cache` as the model is going to run.

    Raises:
        ConfigError: Its positions are fewer than a block's, or it would look across documents that are packed apart.
    """
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions is not None and config.block_size > positions:
        raise ConfigError(
            f"data.block_size = {config.block_size}: the model has {positions} positions; write block_size: "
            f"{positions} or less, or give the model more"
        )
    if config.packing is not True:
        return
    instead = (
        "write packing: concat to let documents see those before them, or packing: false for blocks of one document"
    )
    if model_config.model_type not in PACKING_FAMILIES:
        raise ConfigError(
            f"data.packing = true: {model_config.model_type} is not known to keep to one document of a block, as "
            f"{', '.join(sorted(PACKING_FAMILIES))} are; {instead}"
        )
    attention = getattr(model_config, "_attn_implementation", None)
    if attention not in _MASKED_ATTENTION:
        raise ConfigError(
            f"data.packing = true: attention {attention!r} does not keep to one document of a block, as eager, sdpa "
            f"and flex_attention do; {instead}"
        )
    if getattr(model_config, "use_cache", False):
        raise ConfigError(
            "data.packing = true: with a cache of keys and values transformers does not look at where documents start; "
            "set model.config.use_cache = False while training"
        )


def load_text(config: TextConfig, *, seed: int) -> TextData:
    """Load the text of a stage; every process calls it, and one on each machine tokenises, unless that was done before.

    Args:
        config: The text.
        seed: What decides on the order of each epoch of a stream.

    Raises:
        DataError: The text or the tokenizer cannot be read.
    """
    sources = find_sources(config)
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    share = config.validation_share if len(sources) == 1 else 0.0
    if config.streaming:
        assert tokenizer is not None
        return _stream(config, sources, tokenizer, share, seed)
    tokenizer, (documents, *others) = tokenised_documents(config, sources, tokenizer)
    validation = TokenDocuments(others[0]) if others else TokenDocuments(documents, share, held_out=True)
    train, held_out = (
        Blocks(part, config.block_size, config.packing, tokenizer.eos_token_id)
        for part in (TokenDocuments(documents, share), validation)
    )
    return TextData(train, held_out if len(held_out) else None, tokenizer)


def _stream(
    config: TextConfig,
    sources: Sequence[DocumentSource],
    tokenizer: "PreTrainedTokenizerBase",
    share: float,
    seed: int,
) -> TextData:
    def blocks(source: DocumentSource, *, held_out: bool, shuffled: bool) -> StreamedBlocks:
        source.check_column(source.stream())

        def documents(order: int) -> Iterator[Tokens]:
            texts = _texts(source, share, held_out=held_out)
            return _tokens(_shuffled(texts, order) if shuffled else texts, tokenizer)

        return StreamedBlocks(documents, config.block_size, config.packing, tokenizer.eos_token_id, seed)

    validation = None
    if share or len(sources) > 1:
        validation = blocks(sources[-1], held_out=len(sources) == 1, shuffled=False)
    return TextData(blocks(sources[0], held_out=False, shuffled=config.shuffle), validation, tokenizer)


def _texts(source: DocumentSource, share: float, *, held_out: bool) -> Iterator[str]:
    """Return the documents to learn from, or those that are held out, in the order of the source."""
    texts = (row[source.column] for row in source.stream())
    texts = (text for index, text in enumerate(texts) if source.has_text(text, index))
    return (text for index, text in enumerate(texts) if is_held_out(index, share) is held_out)


def _shuffled(texts: Iterable[str], seed: int) -> Iterator[str]:
    """Yield documents in a random order, as far as a buffer of them goes."""
    random = Random(seed)
    texts = iter(texts)
    buffer = list(itertools.islice(texts, _STREAM_BUFFER))
    for text in texts:
        index = random.randrange(len(buffer))
        yield buffer[index]
        buffer[index] = text
    random.shuffle(buffer)
    yield from buffer


def _tokens(texts: Iterator[str], tokenizer: "PreTrainedTokenizerBase") -> Iterator[Tokens]:
    while batch := list(itertools.islice(texts, _STREAM_BATCH)):
        yield from map(np.asarray, tokenise(batch, tokenizer=tokenizer))
