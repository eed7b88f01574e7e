"""What lies beside a model's tensors in a Hugging Face folder: its `config.json`, and the tokenizer."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from torchacc.checkpoint.other_formats.new_tensors import short
from torchacc.checkpoint.own_format.regular_files import read_regular
from torchacc.errors import CheckpointError

_CONFIG = "config.json"
_MAX_CONFIG_BYTES = 1 << 27
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.json", "chat_template.jinja", "preprocessor_config.json", "processor_config.json"),
)
_INPUT_EMBEDDINGS = (".wte.weight", ".embed_tokens.weight", ".word_embeddings.weight", ".embed_in.weight")
HEAD = "lm_head.weight"


def pretrained_files(folder: Path, dtype: torch.dtype | None = None) -> dict[str, bytes]:
    """Return what there is in a folder of a model's `config.json` and its tokenizer, by name.

    Args:
        folder: The folder.
        dtype: What the config is to say that the model has; None for what it says.
    """
    names = (_CONFIG, "generation_config.json", *_TOKENIZER)
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    if _CONFIG in files and dtype is not None:
        config = _read_config(folder)
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        files[_CONFIG] = (json.dumps({**config, key: short(dtype)}, indent=2) + "\n").encode()
    return files


def tied_head(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return the head that a state lacks where `config.json` says that it is tied: its name -> its other name."""
    config = _read_config(folder)
    architectures = config.get("architectures") or []
    has_head = any(name.endswith(("LMHeadModel", "ForCausalLM")) for name in architectures)
    embeddings = [name for name in names if f".{name}".endswith(_INPUT_EMBEDDINGS)]
    if has_head and config.get("tie_word_embeddings") and HEAD not in names and len(embeddings) == 1:
        return {HEAD: embeddings[0]}
    return {}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / _CONFIG, _MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / _CONFIG} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}
