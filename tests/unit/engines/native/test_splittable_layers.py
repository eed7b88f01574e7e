"""What the native engine does not split, each with the way out; that what it splits is right is in the contract."""

import pytest
import torch
from torch import nn

from torchacc.config import Config
from torchacc.engines.native.splittable_layers import check
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import make_plan

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def make_llama(num_key_value_heads=4):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=num_key_value_heads)
    return transformers.LlamaForCausalLM(config)


def make_apertus():
    """Build a model whose own plan leaves out what is split with its MLP: parameters of an activation."""
    return transformers.ApertusForCausalLM(transformers.ApertusConfig(**SIZES, num_key_value_heads=4))


def make_phi3(num_key_value_heads=4):
    config = transformers.Phi3Config(**SIZES, num_key_value_heads=num_key_value_heads, pad_token_id=0)
    return transformers.Phi3ForCausalLM(config)


def make_gemma(num_key_value_heads=4):
    config = transformers.GemmaConfig(**SIZES, num_key_value_heads=num_key_value_heads, head_dim=8)
    return transformers.GemmaForCausalLM(config)


def make_phi(**options):
    return transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES, **options))


def make_cohere():
    """Build a model whose norms have values of their own for each head."""
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, use_qk_norm=True))


def make_llama_with_norms():
    """Build a model of a known family with what the family does not have."""
    model = make_llama()
    model.model.layers[0].self_attn.q_norm = nn.RMSNorm(8)
    return model


def make_sparse_gemma():
    """Build a model which compares all columns of an MLP."""
    config = transformers.Gemma3nTextConfig(
        **(SIZES | {"intermediate_size": [48], "num_hidden_layers": 1}),
        num_key_value_heads=4,
        head_dim=8,
        vocab_size_per_layer_input=96,
        num_kv_shared_layers=0,
        layer_types=["full_attention"],
        activation_sparsity_pattern=[0.5],
    )
    with torch.device("meta"):
        return transformers.Gemma3nForCausalLM(config)


def checked(model, size=2, **options):
    config = Config(dist={"tp": {"size": size, **options}})
    check(model, make_plan(model, config, Mesh((("dp", 1), ("fsdp", 1), ("tp", size)))))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_llama, {}),
        (make_phi3, {}),
        (make_gemma, {}),
        (lambda: make_llama(2), {"size": 4}),
        (make_apertus, {"plan": {"q_proj": ["tp", None]}}),
        (lambda: make_phi(qk_layernorm=True), {}),
        (make_llama_with_norms, {"plan": {"q_proj": ["tp", None]}}),
    ],
)
def test_what_is_shown_to_compute_right_is_split(make, options):
    checked(make(), **options)


def test_a_family_whose_plan_has_changed_is_refused():
    model = make_gemma()
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "layers.*.input_layernorm": "colwise"}
    with pytest.raises(ConfigError, match=r"gemma declares: it is another one .*config\.dist\.tp\.plan, or use config"):
        checked(model)


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (make_apertus, {}, "by the plan that apertus declares: the native engine splits families for which"),
        (make_llama, {"plan": {"q_proj": ["tp", "fsdp"]}}, r"config\.dist\.tp\.plan gives \['tp', 'fsdp'\] for 'model"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
            {"plan": {"weight": ["tp", None]}},
            r"ReLU\(inplace=True\)",
        ),
        (make_cohere, {}, r"q_norm\.weight' of shape \(4, 8\) norms heads, of which a device has a part"),
        (make_llama_with_norms, {}, r"q_norm\.weight' of shape \(8,\) norms heads, of which a device has a part"),
        (make_sparse_gemma, {}, "activation_sparsity_pattern lets an MLP of gemma3n_text keep what is large"),
        (make_llama, {"sequence_parallel": True}, r"config\.dist\.tp\.sequence_parallel = True is not available"),
        (
            lambda: make_gemma(2),
            {"size": 4},
            "num_key_value_heads = 2 is not a multiple of 4.*a size that divides it, or",
        ),
    ],
)
def test_what_may_compute_other_numbers_is_refused(make, options, match):
    with pytest.raises(ConfigError, match=rf"{match}.*use_spmd = True"):
        checked(make(), **options)


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        (
            "LoraConfig",
            {"target_modules": ["q_proj", "embed_tokens"]},
            r"embed_tokens' is a peft.tuners.lora.layer.Embedding",
        ),
        ("LoraConfig", {"target_modules": ["o_proj"], "use_dora": True}, r"lora_magnitude_vector.*Dora"),
        ("LoraConfig", {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper"),
        (
            "IA3Config",
            {"target_modules": ["k_proj"], "feedforward_modules": []},
            r"is a peft.tuners.ia3.model.IA3Model",
        ),
    ],
)
def test_adapters_of_peft_that_are_not_split_are_refused_until_they_are_merged(kind, options, match):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_llama(), getattr(peft, kind)(**options))
    with pytest.raises(ConfigError, match=rf"{match}.*merge_and_unload\(\)"):
        checked(model)
    checked(model.merge_and_unload())


def test_embeddings_that_count_tokens_are_refused():
    model = make_llama()
    model.model.embed_tokens.scale_grad_by_freq = True
    with pytest.raises(ConfigError, match=r"scale_grad_by_freq=True lets 'model\.embed_tokens' count tokens by rows"):
        checked(model)
