"""Tiny decoders of families whose samples and layers are split, beside those that the cases themselves name."""

from collections.abc import Mapping
from typing import Any

_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "cohere": {},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "glm4": {"head_dim": 8},
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "gpt_neox": {},
    "olmo3": {"sliding_window": 5},
    "phi": {},
    "qwen2_moe": _SHARED,
    "stablelm": {},
    "starcoder2": {},
}
FURTHER_FAMILIES: Mapping[str, dict[str, Any]] = {
    family: {"family": family, "pad_token_id": 0, **options} for family, options in _OPTIONS.items()
}
"""By the family's `model_type`, what a model of it is made of beside the sizes that all have."""
