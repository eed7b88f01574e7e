"""Cases about evaluations under `torch.inference_mode()`, in which XLA's operations are PyTorch's all the same."""

import pytest
import torch
from casekit import (
    ENGINE,
    RANK,
    SPMD,
    XLA,
    accelerate,
    case,
    check_equal,
    check_parameters,
    part,
    plain_value,
    sgd,
    sharded_and_plain,
    step,
)
from torch import nn

import torchacc

PICTURES = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(5))
TOKENS = torch.randint(0, 32, (4, 5), generator=torch.Generator().manual_seed(3))


def make_vision() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 1, groups=2), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(200, 4)
    )


def score(model: nn.Module, pictures: torch.Tensor) -> torch.Tensor:
    """Return the losses of pictures, in an order that comes from a sort."""
    logits = model(pictures)
    losses = nn.functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device), reduction="none")
    return losses.index_select(0, losses.argsort()).cumsum(0)


@case(XLA)
def evaluation_between_steps() -> None:
    model, plain = sharded_and_plain(make_vision)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for is_training in (True, False):
        for each in (model, plain):
            each.train(is_training and ENGINE == SPMD)  # each process has the statistics of its own samples
        step(model, part(PICTURES), optimizer)
        step(plain, PICTURES, plain_optimizer)
        with torch.inference_mode():
            found = score(model, part(PICTURES))
            assert not found.requires_grad
            expected = score(plain, PICTURES if ENGINE == SPMD else PICTURES.chunk(2)[RANK])
        check_equal(plain_value(found), expected, "losses")
    check_parameters(model, plain)


@case(XLA)
def generation_between_steps() -> None:
    import transformers

    def make() -> nn.Module:
        sizes = {"vocab_size": 32, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(**sizes, **dropout, initializer_range=0.5, eos_token_id=31, pad_token_id=31)
        return transformers.GPT2LMHeadModel(config)

    @torch.inference_mode()
    def generate(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2, do_sample=False)

    model, plain = sharded_and_plain(make)
    optimizer, plain_optimizer = sgd(model), sgd(plain)
    for _ in range(2):
        for each, tokens, its in ((model, part(TOKENS), optimizer), (plain, TOKENS, plain_optimizer)):
            its.zero_grad()
            each(input_ids=tokens, labels=tokens).loss.backward()
            its.step()
        found, expected = generate(model, part(TOKENS)), generate(plain, TOKENS)
        check_equal(found.cpu(), expected if ENGINE == SPMD else expected.chunk(2)[RANK], "tokens")
    check_parameters(model, plain)


@case(XLA)
def accelerate_in_inference_mode_is_refused() -> None:
    with torch._C._InferenceMode(True), pytest.raises(torchacc.EngineError, match="inside of torch.inference_mode"):
        accelerate(nn.Linear(8, 4))
