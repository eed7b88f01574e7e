"""The models and the data of the contract tests: small, seeded, and different in what is hard to shard.

For `training_cases.py`.
"""

from pathlib import Path

import torch
import transformers
from torch import nn

LENGTH = 16
VOCAB = 131
"""Odd, so that the rows of an embedding divide by no number of devices."""
NUM_SAMPLES = 28
"""No multiple of the global batch: the last one of an epoch is completed by wrapping around."""

_TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def make_gpt2() -> nn.Module:
    shape = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**shape, **_NO_DROPOUT, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def make_llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def make_mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**_DECODER, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    return transformers.MixtralForCausalLM(config)


def make_bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def make_t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


class Stage(nn.Module):
    def __init__(self, before: int, after: int, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.norm = norm

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(images)))


class Cnn(nn.Module):
    """Channels that do not divide by 4, and no loss of its own: the script computes it from the logits."""

    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        sizes = [3, 6, 10]
        norms = [nn.BatchNorm2d(size) if batch_norm else nn.GroupNorm(2, size) for size in sizes[1:]]
        self.stages = nn.ModuleList([Stage(*pair, norm) for *pair, norm in zip(sizes, sizes[1:], norms, strict=False)])
        self.head = nn.Linear(sizes[-1], 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = images
        for stage in self.stages:
            hidden = stage(hidden)
        return self.head(hidden.mean((2, 3)))


def make_model(name: str, *, chooses_experts: bool) -> nn.Module:
    """Build a model from the state of torch's generator.

    Args:
        name: `cnn-batchnorm`, or a key of `FROZEN`.
        chooses_experts: Whether to choose the experts that can run on a CPU, as accelerate() does by itself under XLA.
    """
    if name.startswith("cnn"):
        return Cnn(batch_norm=name == "cnn-batchnorm")
    model = _MAKERS[name]()
    if name == "mixtral" and chooses_experts:
        model.set_experts_implementation("batched_mm")
    return model


_MAKERS = {"gpt2": make_gpt2, "llama": make_llama, "mixtral": make_mixtral, "bert": make_bert, "t5": make_t5}
MODELS = (*_MAKERS, "cnn", "cnn-batchnorm")
FROZEN = {
    "gpt2": "transformer.h.0.",
    "llama": "model.embed_tokens.",
    "mixtral": "model.layers.0.",
    "bert": "bert.embeddings.",
    "t5": "shared.",  # tied to three other names
    "cnn": "stages.0.",
}
"""The part of each model that a test freezes: the prefix of its parameters' names."""


def make_data(model: str, *, ragged: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return the samples for a model, always the same.

    Args:
        model: A name that `make_model` takes.
        ragged: Whether the samples of a causal language model have different numbers of labels.
    """
    if model.startswith("cnn"):
        return [_image(index) for index in range(NUM_SAMPLES)]
    samples = [_sample(model, index) for index in range(NUM_SAMPLES)]
    if ragged:
        for index, sample in enumerate(samples):
            sample["labels"][3 + index % (LENGTH - 3) :] = -100
    return samples


def _image(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    label = torch.tensor(index % 5)
    return {"images": torch.randn(3, 8, 8, generator=generator) + 0.3 * label, "labels": label}


def _sample(model: str, index: int) -> dict[str, torch.Tensor]:
    window = _TEXT[200 + index * 61 :]
    ids, following = (torch.tensor(list(window[at : at + LENGTH])) for at in (0, LENGTH))
    if model == "bert":
        mask = (torch.arange(LENGTH) < LENGTH - index % 5).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids == ord("e")).sum().clamp(max=2)}
    return {"input_ids": ids, "labels": following if model == "t5" else ids.clone()}
