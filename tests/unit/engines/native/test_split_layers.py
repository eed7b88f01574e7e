"""What the native engine does not split, each with the way out; that what it splits is right is in the contract."""

import pytest

from torchacc.config import Config
from torchacc.engines.native.split_layers import check
from torchacc.errors import ConfigError
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import make_plan

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


def make_llama(num_key_value_heads=4):
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=num_key_value_heads)
    return transformers.LlamaForCausalLM(config)


def make_gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4))


def checked(model, size=2, **options):
    config = Config(dist={"tp": {"size": size, **options}})
    check(model, make_plan(model, config, Mesh((("dp", 1), ("fsdp", 1), ("tp", size)))))


def test_a_known_family_is_split():
    checked(make_llama())


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        (make_gpt2, {}, "by the plan of gpt2: the native engine splits the layers of bert, llama,"),
        (make_llama, {"plan": {"q_proj": ["tp", None]}}, r"by the plan of config\.dist\.tp\.plan: the native engine"),
        (make_llama, {"sequence_parallel": True}, r"config\.dist\.tp\.sequence_parallel = True is not available"),
        (lambda: make_llama(2), {"size": 4}, "num_key_value_heads = 2 is no multiple of 4"),
    ],
)
def test_what_may_compute_other_numbers_is_refused(make, options, match):
    with pytest.raises(ConfigError, match=rf"{match}.*use_spmd = True"):
        checked(make(), **options)


def test_adapters_of_peft_are_refused_until_they_are_merged():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"an adapter of peft \(PeftModel.*merge_and_unload\(\)"):
        checked(model)
    checked(model.merge_and_unload())
