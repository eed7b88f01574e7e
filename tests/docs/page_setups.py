"""What programs of pages find before their first line: `<!-- setup: gpt2 -->` calls `gpt2()`, in the program's folder.

As small as it can be, and of the very kind that the page speaks of: a setup changes sizes, never what a page means.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import torchacc

SETUPS: dict[str, Callable[[], dict[str, Any] | None]] = {}


def setup(function: Callable[[], dict[str, Any] | None]) -> Callable[[], dict[str, Any] | None]:
    SETUPS[function.__name__] = function
    return function


@setup
def gpt2() -> dict[str, Any]:
    """Imports, a tiny GPT-2 with a loader of batches for it, and an empty config."""
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 32}
    gpt2_config = GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    rows = torch.randint(0, 64, (8, 16))
    data = [{"input_ids": row, "labels": row} for row in rows]
    return {
        "torch": torch,
        "torchacc": torchacc,
        "DataLoader": DataLoader,
        "GPT2LMHeadModel": GPT2LMHeadModel,
        "gpt2_config": gpt2_config,
        "model": GPT2LMHeadModel(gpt2_config),
        "data": data,
        "loader": DataLoader(data, batch_size=1),
        "config": torchacc.Config(),
    }


@setup
def config() -> dict[str, Any]:
    """Return imports and an empty config."""
    return {"torch": torch, "torchacc": torchacc, "DataLoader": DataLoader, "config": torchacc.Config()}


@setup
def sharded() -> dict[str, Any]:
    """Shard what `gpt2` has over all processes, with an optimizer and a schedule."""
    return _sharded(use_spmd=False)


@setup
def spmd() -> dict[str, Any]:
    """Shard what `gpt2` has over two devices of this process, with an optimizer and a schedule."""
    return _sharded(use_spmd=True)


def _sharded(*, use_spmd: bool) -> dict[str, Any]:
    names = gpt2()
    size = 2 if use_spmd else torchacc.dist.world_size()
    names["config"].dist.fsdp.size = size
    names["config"].dist.fsdp.use_spmd = use_spmd
    model, loader = torchacc.accelerate(names["model"], names["loader"], names["config"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {**names, "model": model, "loader": loader, "optimizer": optimizer, "scheduler": scheduler, "num_epochs": 1}


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(8, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            nn.functional.normalize(self.images(images)),
            nn.functional.normalize(self.texts(texts)),
            self.scale.exp(),
        )


@setup
def two_towers() -> dict[str, Any]:
    """Shard two encoders of images and texts over all processes."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8, 8), torch.randn(8, 6))
    config = torchacc.Config(backend="native")
    model, loader = torchacc.accelerate(_Towers(), DataLoader(data, batch_size=2), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = {"torch": torch, "torchacc": torchacc, "cross_entropy": nn.functional.cross_entropy}
    return {**names, "model": model, "loader": loader, "optimizer": optimizer}


@setup
def trained() -> dict[str, Any]:
    """Return what `sharded` has, after a step, with what a script has by then."""
    names = sharded()
    loss = names["model"](**next(iter(names["loader"]))).loss
    loss.backward()
    norm = names["model"].clip_grad_norm_(1.0)
    names["optimizer"].step()
    words = {"[UNK]": 0, "[EOS]": 1, "word": 2}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[EOS]")
    made = {"loss": loss, "norm": norm, "step": 1, "tokenizer": tokenizer, "evaluate": lambda model: 1.0}
    return {**names, **made}


@setup
def folder() -> dict[str, Any]:
    """Write a Hugging Face folder of `gpt2`'s model."""
    names = gpt2()
    names["model"].save_pretrained("folder")
    return {
        **names,
        "folder": Path("folder"),
        "torchacc_config": names["config"],
        "AutoConfig": AutoConfig,
        "AutoModelForCausalLM": AutoModelForCausalLM,
    }


@setup
def gpt2_folder() -> None:
    """Put the configuration of GPT-2 where `gpt2` names it, as no hub can be reached."""
    GPT2Config().save_pretrained("gpt2")


@setup
def books() -> dict[str, Any]:
    """Write text files."""
    Path("books").mkdir()
    for number in range(8):
        Path(f"books/{number}.txt").write_text(f"The {number}th book is about sharding. " * 50, encoding="utf-8")
    return {"DataLoader": DataLoader}


@setup
def script() -> None:
    """Put a program `train.py` there, which trains for a step on as many processes as there are."""
    shutil.copy(Path(__file__).with_name("train.py"), "train.py")


@setup
def checkpoint() -> dict[str, Any]:
    """Save a checkpoint `model-a` of what `trained` has."""
    names = trained()
    torchacc.checkpoint.save("model-a", model=names["model"], optimizer=names["optimizer"])
    return names
