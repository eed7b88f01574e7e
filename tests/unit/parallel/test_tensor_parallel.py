"""Which dimension of which parameter is split, without a device."""

import re

import pytest
import torch
from torch import nn

from torchacc.config import Config
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import make_plan
from torchacc.parallel.tensor_parallel import FAMILIES

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False}
BY_OUTPUT, BY_INPUT = ("tp", None), (None, "tp")


def make(name, **sizes):
    """Build a model without memory."""
    config, model = {
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
        "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
    }[name]
    own = {
        "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "bert": SIZES,
        "t5": {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "phi3": {**DECODER, "pad_token_id": 0},
    }.get(name, DECODER)
    with torch.device("meta"):
        return model(config(**{**own, **sizes}))


class Mlp(nn.Module):
    """Of no known family."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def plan(model, tp=2, fsdp=1, **options):
    config = Config(dist={"tp": {"size": tp, **options}, "fsdp": {"size": fsdp}})
    return make_plan(model, config, Mesh((("dp", 1), ("fsdp", fsdp), ("tp", tp))))


def refusal(*args, **options):
    with pytest.raises(ConfigError) as raised:
        plan(*args, **options)
    return str(raised.value)


def kinds(model, **options):
    """Return the specs by the names of a layer's parameters, those of repeated layers once."""
    specs = plan(model, **options).tensor_parallel.specs
    return {re.sub(r"^.*\.\d+\.", "", name): spec for name, spec in specs.items()}


# The families


LLAMA_BLOCK = {
    "self_attn.q_proj.weight": BY_OUTPUT,
    "self_attn.k_proj.weight": BY_OUTPUT,
    "self_attn.v_proj.weight": BY_OUTPUT,
    "self_attn.o_proj.weight": BY_INPUT,
}
LLAMA_MLP = {"mlp.gate_proj.weight": BY_OUTPUT, "mlp.up_proj.weight": BY_OUTPUT, "mlp.down_proj.weight": BY_INPUT}
VOCABULARY = {"model.embed_tokens.weight": BY_OUTPUT, "lm_head.weight": BY_OUTPUT}
EXPECTED = {
    "llama": {**VOCABULARY, **LLAMA_BLOCK, **LLAMA_MLP},
    "mistral": {**VOCABULARY, **LLAMA_BLOCK, **LLAMA_MLP},
    "qwen2": {**VOCABULARY, **LLAMA_BLOCK, **LLAMA_MLP, **{f"self_attn.{name}_proj.bias": ("tp",) for name in "qkv"}},
    "qwen3": {**VOCABULARY, **LLAMA_BLOCK, **LLAMA_MLP},
    "mixtral": {
        **VOCABULARY,
        **LLAMA_BLOCK,
        "mlp.experts.gate_up_proj": (None, "tp", None),
        "mlp.experts.down_proj": (None, None, "tp"),
    },
    "gpt2": {
        "transformer.wte.weight": BY_OUTPUT,
        "attn.c_attn.weight": BY_INPUT,
        "attn.c_attn.bias": ("tp",),
        "attn.c_proj.weight": BY_OUTPUT,
        "mlp.c_fc.weight": BY_INPUT,
        "mlp.c_fc.bias": ("tp",),
        "mlp.c_proj.weight": BY_OUTPUT,
    },
    "bert": {
        "bert.embeddings.word_embeddings.weight": BY_OUTPUT,
        **{f"attention.self.{name}.weight": BY_OUTPUT for name in ("query", "key", "value")},
        **{f"attention.self.{name}.bias": ("tp",) for name in ("query", "key", "value")},
        "attention.output.dense.weight": BY_INPUT,
        "intermediate.dense.weight": BY_OUTPUT,
        "intermediate.dense.bias": ("tp",),
        "output.dense.weight": BY_INPUT,
    },
    "t5": {
        "shared.weight": BY_OUTPUT,
        "SelfAttention.relative_attention_bias.weight": BY_INPUT,
        **{f"{kind}Attention.{name}.weight": BY_OUTPUT for kind in ("Self", "EncDec") for name in "qkv"},
        **{f"{kind}Attention.o.weight": BY_INPUT for kind in ("Self", "EncDec")},
        "DenseReluDense.wi.weight": BY_OUTPUT,
        "DenseReluDense.wo.weight": BY_INPUT,
    },
}


def test_every_family_is_tested():
    assert set(EXPECTED) == set(FAMILIES)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_plan_of_a_family(name):
    assert kinds(make(name)) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_nearly_all_of_each_layer_is_split(name):
    found = plan(make(name))
    layers = [unit for unit in found.units if "." in unit.name and unit.name[-1].isdigit()]
    assert layers
    for layer in layers:
        split = sum(p.numel for p in layer.parameters if "tp" in found.tensor_parallel.spec_of(p.name))
        assert split > 0.95 * layer.numel


def test_a_model_inside_of_another_is_known_too():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make("llama")

        def forward(self, **batch):
            return self.inner(**batch)

    assert plan(Wrapper()).tensor_parallel.specs["inner.lm_head.weight"] == BY_OUTPUT


def test_a_model_may_declare_its_plan_itself():
    found = kinds(make("gemma", head_dim=8))
    assert found == {**LLAMA_BLOCK, **LLAMA_MLP, "lm_head.weight": BY_OUTPUT}
    assert kinds(make("phi3"))["self_attn.qkv_proj.weight"] == BY_OUTPUT


def test_without_tensor_parallelism_nothing_is_asked_of_the_model():
    found = plan(Mlp(), tp=1)
    assert found.tensor_parallel.specs == {}
    assert "tp" not in str(found)


# What does not divide


def test_a_vocabulary_that_does_not_divide_stays_whole():
    split = plan(make("gpt2", vocab_size=97)).tensor_parallel
    assert split.unsplit == {"transformer.wte.weight": "97 is not a multiple of 2"}
    assert "transformer.wte.weight" not in split.specs


def test_too_few_key_value_heads_stay_whole():
    split = plan(make("llama"), tp=4).tensor_parallel
    assert {re.sub(r"\.\d\.", ".*.", name) for name in split.unsplit} == {
        "model.layers.*.self_attn.k_proj.weight",
        "model.layers.*.self_attn.v_proj.weight",
    }
    assert set(split.unsplit.values()) == {"num_key_value_heads = 2 is not a multiple of 4"}
    assert split.specs["model.layers.0.self_attn.q_proj.weight"] == BY_OUTPUT


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "mixtral"])
def test_heads_that_do_not_divide_are_refused(name):
    assert "num_attention_heads = 4 is not a multiple of 3" in refusal(make(name), tp=3)


def test_a_layer_that_does_not_divide_is_refused():
    message = refusal(make("llama", intermediate_size=49))
    assert "config.dist.tp.size = 2 cannot split 'model.layers.0.mlp.gate_proj.weight' of shape (49, 32)" in message
    assert "49 is not a multiple of 2" in message


# A plan of the user's own


def test_the_first_pattern_that_fits_decides():
    found = plan(Mlp(), plan={r"up\.weight": [None, None], r"weight$": ["tp", "fsdp"]}, fsdp=2).tensor_parallel
    assert found.specs == {"up.weight": (None, None), "down.weight": ("tp", "fsdp")}
    assert found.declared_by == "config.dist.tp.plan"


def test_a_tied_parameter_is_found_by_each_of_its_names():
    found = plan(make("gpt2"), plan={r"^lm_head": ["tp", None]})
    assert found.tensor_parallel.specs == {"transformer.wte.weight": BY_OUTPUT}


def test_a_pattern_that_is_found_nowhere_is_refused():
    message = refusal(make("llama"), plan={r"\.(q|k)_proj\.weight$": ["tp", None], "qkv": ["tp", None]})
    assert "the pattern 'qkv', which is found in no parameter's name" in message
    assert "its parameters are model.embed_tokens.weight, model.layers.*.self_attn.q_proj.weight" in message


def test_a_spec_has_one_entry_for_each_dimension():
    message = refusal(Mlp(), plan={"up": ["tp", None]})
    assert "has 2 entries, and fits 'up.bias' of shape (12,)" in message


@pytest.mark.parametrize(("spec", "axis", "length"), [(["tp", None], "tp", 12), ([None, "fsdp"], "fsdp", 8)])
def test_a_dimension_that_does_not_divide_is_refused(spec, axis, length):
    message = refusal(Mlp(), tp=5, fsdp=3, plan={r"up\.weight": spec})
    assert f"{length} is not a multiple of {axis}'s" in message


def test_an_own_plan_is_checked_with_one_device_too():
    assert "found in no parameter's name" in refusal(Mlp(), tp=1, plan={"left": ["tp", None]})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"up": ["dp", None]}, "dist.tp.plan = {'up': ['dp', None]}: expected 'fsdp' or 'tp'"),
        ({"up": ["tp", "tp"]}, "each axis at most once"),
        ({"(up": ["tp", None]}, "'(up' is none"),
        ({}, "at least 1 item"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_where_it_is_set(given, expected):
    config = Config()
    with pytest.raises(ConfigError, match=re.escape(expected)):
        config.dist.tp.plan = given


def test_a_plan_keeps_its_order_in_a_file(tmp_path):
    own = {"z$": ["tp", None], "a$": [None], "m$": ["fsdp", "tp"]}
    Config(dist={"tp": {"size": 2, "plan": own, "sequence_parallel": True}}).to_yaml(tmp_path / "config.yaml")
    read = Config.from_yaml(tmp_path / "config.yaml").dist.tp
    assert list(read.plan.items()) == list(own.items())
    assert read.sequence_parallel


# No plan


def test_nothing_between_units_is_split_where_there_are_none():
    message = refusal(Mlp(), plan={"up.weight": ["tp", None]}, sequence_parallel=True)
    assert "Mlp has no layers that become units" in message
    assert "wrap_layer_cls" in message


def test_a_model_that_nothing_is_known_of_is_refused():
    message = refusal(Mlp())
    assert "of none of the families bert, gpt2, llama," in message
    assert "config.dist.tp.plan" in message
    assert "its parameters are up.weight, up.bias, down.weight, down.bias" in message


# In words


def test_a_plan_in_words():
    assert str(plan(make("llama", vocab_size=97), sequence_parallel=True)).splitlines()[4:] == [
        "  layers split over tp 2 by the plan of llama, activations between units along their length",
        "    model.layers.*.self_attn.q_proj.weight (2)  (tp, -)",
        "    model.layers.*.self_attn.k_proj.weight (2)  (tp, -)",
        "    model.layers.*.self_attn.v_proj.weight (2)  (tp, -)",
        "    model.layers.*.self_attn.o_proj.weight (2)  (-, tp)",
        "    model.layers.*.mlp.gate_proj.weight (2)  (tp, -)",
        "    model.layers.*.mlp.up_proj.weight (2)  (tp, -)",
        "    model.layers.*.mlp.down_proj.weight (2)  (-, tp)",
        "    model.embed_tokens.weight  not split: 97 is not a multiple of 2",
        "    lm_head.weight  not split: 97 is not a multiple of 2",
    ]
