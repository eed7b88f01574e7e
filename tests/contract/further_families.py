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
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}
_OPTIONS: Mapping[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {},
    "cohere2": {"sliding_window": 5},
    "cwm": {"head_dim": 8, "sliding_window": 5},
    "deepseek_v2": {**_ROUTED, **_LATENT},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "dots1": {**_ROUTED, "head_dim": 8, "n_shared_experts": 1},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": {"sliding_window": 5},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {**_ROUTED, "head_dim": 8},
    "gpt_neox": {},
    "granitemoe": _EXPERTS,
    "granitemoeshared": {**_EXPERTS, "shared_intermediate_size": 16},
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jais2": {},
    "ministral": {"head_dim": 8, "sliding_window": 5},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": {"sliding_window": 5},
    "olmoe": _EXPERTS,
    "phi": {},
    "qwen2_moe": _SHARED,
    "seed_oss": {"head_dim": 8, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "stablelm": {},
    "starcoder2": {},
}
FURTHER_FAMILIES: Mapping[str, dict[str, Any]] = {
    family: {"family": family, "pad_token_id": 0, **options} for family, options in _OPTIONS.items()
}
"""By the family's `model_type`, what a model of it is made of beside the sizes that all have."""
FAMILIES_ALIKE = (
    *("apertus", "arcee", "cwm", "dots1", "ernie4_5", "glm", "granitemoeshared", "helium", "hunyuan_v1_moe", "jais2"),
    *("ministral", "nemotron", "olmo", "olmoe", "seed_oss"),
)
"""Those that are built as others here are, but for activations, norms and sizes."""
