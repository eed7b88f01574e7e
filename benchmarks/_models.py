"""The models that the benchmarks train."""

from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)


def make_gpt2(layers: int, width: int, heads: int, vocabulary: int, length: int) -> Any:
    """Return a GPT-2 without dropout, always with the same values."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).train()


def make_llama(layers: int, width: int, heads: int, vocabulary: int, length: int) -> Any:
    """Return a Llama, always with the same values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).train()


def make_mixtral(layers: int, width: int, heads: int, vocabulary: int, length: int) -> Any:
    """Return a Mixtral of eight experts, of which a token uses two, always with the same values."""
    torch.manual_seed(0)
    config = MixtralConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return MixtralForCausalLM(config).train()


def make_adapted_llama(layers: int, width: int, heads: int, vocabulary: int, length: int) -> Any:
    """Return a Llama whose adapters of LoRA alone are trained, always with the same values."""
    from peft import LoraConfig, inject_adapter_in_model

    return inject_adapter_in_model(LoraConfig(r=16), make_llama(layers, width, heads, vocabulary, length))


MAKERS = {"gpt2": make_gpt2, "llama": make_llama, "llama with LoRA": make_adapted_llama, "mixtral": make_mixtral}
"""By family."""
