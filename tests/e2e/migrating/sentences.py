"""What the scripts of this folder import: sentences that are to be classified, and a small BERT."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

BATCH, EPOCHS, ACCUMULATED = 4, 2, 2
FOLDER = Path(sys.argv[1])


def sentences(num: int) -> list[dict[str, Any]]:
    """Return lines of Python's documentation of `str` in bytes, whether each speaks of a return value."""
    lines = [line.strip() for name in sorted(dir(str)) for line in (getattr(str, name).__doc__ or "").splitlines()]
    chosen = [line[:48] for line in lines if len(line) > 12][:num]
    return [{"input_ids": list(line.encode("ascii")), "labels": int("eturn" in line)} for line in chosen]


def training_sentences() -> list[dict[str, Any]]:
    """Return 40, which are no whole number of accumulation windows."""
    return sentences(53)[:40]


def held_out_sentences() -> list[dict[str, Any]]:
    """Return 13, which are no whole number of batches."""
    return sentences(53)[40:]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest."""
    length = max(len(sample["input_ids"]) for sample in samples)
    padded = [sample["input_ids"] + [0] * (length - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(padded)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def make_model() -> BertForSequenceClassification:
    """Return the model, with the same values in every process."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=128, max_position_embeddings=64, **size, **dropout))
