"""Which model a section of the file becomes."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from torchacc.cli import _plan_input
from torchacc.engines import deferred
from torchacc.errors import ConfigError, DataError
from torchacc.train import models as built
from torchacc.train.models import build_model, loss_of, model_config, planned_config, scaling_added_losses
from torchacc.train.tokens import load_tokenizer

SMALL = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models

    words = {word: index for index, word in enumerate(["<end>", *"abcdefghi"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "<end>")), eos_token="<end>")


def test_vocabulary_and_special_tokens_are_the_tokenizers(tokenizer):
    config = model_config(SMALL, tokenizer)
    assert isinstance(config, GPT2Config)
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id, config.n_layer) == (10, 0, None, 1)
    assert model_config(SMALL | {"vocab_size": 16}, tokenizer).vocab_size == 16
    with pytest.raises(ConfigError, match="vocab_size = 8 of the model, and the tokenizer has 10 tokens"):
        model_config(SMALL | {"vocab_size": 8}, tokenizer)


def test_a_pretrained_model_keeps_its_own_configuration(tokenizer, tmp_path):
    GPT2Config(vocab_size=20, n_layer=3, n_embd=32, n_head=2).save_pretrained(tmp_path)
    config = model_config({"pretrained": str(tmp_path)}, tokenizer)
    assert (config.vocab_size, config.n_layer) == (20, 3)


def test_a_new_model_has_recipes_and_one_that_is_loaded_has_no_values(tokenizer):
    config = model_config(SMALL | {"vocab_size": 64}, tokenizer)
    new, empty = (build_model(config, initialised=initialised) for initialised in (True, False))
    assert deferred.is_recorded(new.transformer.wte.weight)
    assert empty.transformer.wte.weight.is_meta
    assert not deferred.is_recorded(empty.transformer.wte.weight)


def test_a_loss_is_the_sum_over_targets_divided(tokenizer):
    model = AutoModelForCausalLM.from_config(model_config(SMALL, tokenizer)).eval()
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[1, 2, -100, 4]])}
    whole = loss_of(model, batch, 1).item()
    assert whole == pytest.approx(2 * model(**batch).loss.item(), rel=1e-6)
    assert loss_of(model, batch, torch.tensor(4.0)).item() == pytest.approx(whole / 4)


ADDED = {
    "mixtral": {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "jetmoe": {"num_local_experts": 4, "output_router_logits": True, "aux_loss_coef": 0.5, "kv_channels": 16},
    "bamba": {"z_loss_coefficient": 0.5, "mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [0]},
}


@pytest.mark.parametrize("family", ADDED)
def test_what_a_model_adds_to_its_loss_is_scaled(family):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads, **ADDED[family])).eval()
    tokens = torch.arange(8).view(2, 4)
    batch = {"input_ids": tokens, "labels": tokens}
    found = {}
    for factor in (0, 0.25, 1):
        with scaling_added_losses(model, factor):
            found[factor] = loss_of(model, batch, 6).item()
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    assert found[0] == pytest.approx(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).item())
    assert found[1] > found[0] + 0.1
    assert found[0.25] == pytest.approx(0.75 * found[0] + 0.25 * found[1])
    assert loss_of(model, batch, 6).item() == found[1]


def test_a_model_that_cannot_divide_its_loss_is_refused(tokenizer, monkeypatch):
    config = model_config(SMALL, tokenizer)
    model_class = type(AutoModelForCausalLM.from_config(config))
    monkeypatch.setattr(model_class, "accepts_loss_kwargs", False, raising=False)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel takes no num_items_in_batch"):
        build_model(config, initialised=False)


# Errors of a model without values


def failing(error):
    def loss(model, batch, divisor):
        raise error

    return loss


@pytest.mark.parametrize(
    "error",
    [KeyError("metadata"), RuntimeError("the model's metadata is wrong"), ValueError("on meta"), RuntimeError("metal")],
)
def test_an_error_that_only_sounds_like_missing_values_is_reported(monkeypatch, error):
    monkeypatch.setattr(built, "loss_of", failing(error))
    with pytest.raises(ConfigError, match="and not run it"):
        built._check_forward(SimpleNamespace())


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.ones(1, device="meta").item(),
        lambda: torch.ones(2, device="meta").nonzero(),
        lambda: torch.ones(2, device="meta").tolist(),
        lambda: torch.ones(2, device="meta").numpy(),
        lambda: torch.ones(2, device="meta").cpu(),
        lambda: bool(torch.ones(1, device="meta")),
        lambda: torch.ones(2, device="meta").masked_select(torch.ones(2, device="meta") > 0),
        lambda: torch.ones(2, device="meta").repeat_interleave(torch.ones(2, device="meta", dtype=torch.long)),
        lambda: torch.ones(2, device="meta") + torch.ones(2),
        lambda: torch.ones(2, device="meta").unique(),
    ],
)
def test_missing_values_are_no_reason_to_refuse_a_model(monkeypatch, fail):
    with pytest.raises((NotImplementedError, RuntimeError, TypeError)) as raised:
        fail()
    monkeypatch.setattr(built, "loss_of", failing(raised.value))
    built._check_forward(SimpleNamespace())


def test_no_code_of_a_checkpoint_is_run_and_nobody_is_asked(tmp_path, monkeypatch):
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PretrainedConfig as Config\n"
    (tmp_path / "evil.py").write_text(code)
    described = {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Config", None]},
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))

    def ask(*_):
        raise AssertionError("the user was asked")

    monkeypatch.setattr("builtins.input", ask)
    for read in (
        lambda: planned_config({"pretrained": str(tmp_path)}),
        lambda: model_config({"pretrained": str(tmp_path)}, None),
        lambda: load_tokenizer(str(tmp_path)),
        lambda: _plan_input._model_config(str(tmp_path), {}),
    ):
        with pytest.raises((ConfigError, DataError), match=r"custom code|trust_remote_code"):
            read()
    assert not (tmp_path / "ran").exists()
