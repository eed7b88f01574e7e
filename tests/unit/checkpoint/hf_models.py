"""Small models of transformers, by the names of their cases."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import torchacc

transformers = pytest.importorskip("transformers", minversion="5")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping")
core_model_loading = pytest.importorskip("transformers.core_model_loading")

VOCAB = 60

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
MIXTRAL = {**LLAMA, "num_local_experts": 12}  # more than nine: "10" comes before "2" in the order of names
QWEN2_MOE = {
    **LLAMA,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}

MODELS = {
    "mixtral": ("MixtralForCausalLM", MIXTRAL),
    "mixtral-tied": ("MixtralForCausalLM", {**MIXTRAL, "tie_word_embeddings": True}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", QWEN2_MOE),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-untied": ("GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama-tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen2-tied": ("Qwen2ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "bert-masked-lm": ("BertForMaskedLM", BERT),
    "bert-masked-lm-untied": ("BertForMaskedLM", {**BERT, "tie_word_embeddings": False}),
    "bert-classifier": ("BertForSequenceClassification", {**BERT, "num_labels": 5}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-untied": ("T5ForConditionalGeneration", {**T5, "tie_word_embeddings": False}),
}
AUTO = {
    "BertForMaskedLM": "AutoModelForMaskedLM",
    "BertForSequenceClassification": "AutoModelForSequenceClassification",
    "T5ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}
every_model = pytest.mark.parametrize("name", MODELS)


def make(name, *, meta=False, **changes):
    """Build a model whose every parameter is random, also those that are usually zero or one."""
    class_name, options = MODELS[name]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{**options, **changes})
    if meta:
        with torch.device("meta"):
            return model_class(config)
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def accelerate(model, **fsdp):
    config = torchacc.Config()
    config.backend = "native"
    for key, value in fsdp.items():
        setattr(config.dist.fsdp, key, value)
    return torchacc.accelerate(model, config=config)


def loaded(folder, name, **changes):
    """Return what is loaded into a sharded model that was built on the meta device."""
    model = accelerate(make(name, meta=True, **changes))
    torchacc.checkpoint.load(folder, model=model)
    return torchacc.full_state_dict(model)


def change(folder, edit):
    """Change the tensors of a checkpoint in one file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def check_equal(state, wanted):
    assert state.keys() == wanted.keys()
    different = [key for key in wanted if not torch.equal(state[key], wanted[key])]
    assert not different


def tied(model):
    """Return the names of each group of names that are one parameter."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}
