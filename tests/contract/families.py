"""Every family of models that transformers can build small: its configuration, a model, and a batch that fits it."""

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BATCH = 4
LENGTH = 12
VOCABULARY = 160
TOKENS = 100
"""Tokens from 20 on to this one are drawn; the others are special."""

MOST = 5_000_000
"""Parameters of a model that counts as small."""

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}

_SMALL = {
    r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|emb_dim|d_embed|model_dim|projection_dim|hidden_channels"
    r"|backbone_hidden_size|attention_hidden_size|decoder_hidden_size|word_embed_proj_dim|input_size|lru_width"
    r"|vocab_hidden_size|bottleneck_size|true_hidden_size|encoder_hidden_size|altup_num_inputs_dim": 32,
    r"intermediate_size|.*ffn_dim|ffn_hidden_size|d_ff|n_inner|.*_intermediate_size|intermediate_dim|d_inner"
    r"|intermediate_size_.*|feed_forward_size|d_ffn|ffn_dim": 64,
    r"(num_)?(hidden_)?layers|n_layers?|num_hidden_layers|num_layers|(en|de)coder_layers|num_(en|de)coder_layers"
    r"|num_blocks|num_hidden_groups|num_block_layers|e_layers": 2,
    r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|num_query_heads|attention_heads": 4,
    r"num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|swa_num_key_value_heads": 2,
    r"head_dim|kv_channels|d_kv|qk_rope_head_dim|qk_nope_head_dim|v_head_dim|kv_lora_rank|.*_head_dim|d_head": 8,
    r"q_lora_rank": 16,
    r"rotary_dim": 4,
    r"vocab_size|.*_vocab_size|src_vocab_size|tgt_vocab_size|vocab_size_per_layer_input": VOCABULARY,
    r"max_position_embeddings|n_positions|n_ctx|max_(source|target|encoder|decoder)_positions?|seq_length|max_seq_len"
    r"|max_sequence_length|max_length|max_position": 64,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts": 4,
    r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token|moe_top_k": 2,
    r"n_group|topk_group|n_shared_experts": 1,
    r"image_size|input_resolution|img_size": 64,
    r"patch_size": 8,
    r"state_size|mamba_d_state|ssm_state_size|mamba_state_dim": 8,
    r"mamba_n_heads|mamba_num_heads": 8,
    r"mamba_d_head|mamba_head_dim": 8,
    r"sliding_window|attention_window|local_attention|window_size|chunk_size|block_size|attention_chunk_size": 8,
    r"hidden_size_per_layer_input": 8,
    r"time_step_rank|mamba_dt_rank": 4,
}
"""Regular expression of the names of options -> their value in a small model."""

_NOTHING = re.compile(r".*drop.*|.*jitter.*|.*noise.*")
"""Names of options that make a step a matter of chance."""

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "longcat_flash": {"num_layers": 2, "num_hidden_layers": 4, "head_dim": 8, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8], "hidden_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mobilebert": {"embedding_size": 32, "hidden_size": 64, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4, "pad_token_id": 1},
    "xmod": {"default_language": "en_XX"},
    "t5": {"decoder_start_token_id": 0},
    "longt5": {"decoder_start_token_id": 0, "local_radius": 4},
    "switch_transformers": {"decoder_start_token_id": 0},
    "bit": {"num_groups": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "topk_group": 1},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "esmc": {"num_key_value_heads": None},
}
"""Name of a family's configuration -> options of a small one that the names do not tell."""


TOO_LARGE = {
    "perceiver": "a step takes gigabytes",
    "vibevoice_asr": "it has 171 million parameters",
    "granite_speech": "it has 55 million parameters",
    "granite_speech_plus": "it has 55 million parameters",
}


@dataclass(frozen=True)
class Family:
    """A class of models: how it is trained, and its name in transformers."""

    kind: str
    model_type: str
    model_class: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.model_type}"


def all_families() -> dict[str, Family]:
    """Return the families of the transformers that is installed, by name."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found = {}
    for kind, mapping in KINDS.items():
        for model_type, classes in getattr(auto, mapping).items():
            each = classes if isinstance(classes, str) else classes[0]
            found[f"{kind}-{model_type}"] = Family(kind, model_type, each)
    return found


def build(family: Family) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a small model and a batch with labels."""
    import transformers

    if family.model_type in TOO_LARGE:
        raise RuntimeError(f"the names of its options do not tell how to make it small: {TOO_LARGE[family.model_type]}")
    cls: Any = getattr(transformers, family.model_class)
    config = small_config(cls.config_class)
    config.use_cache = False
    torch.manual_seed(1)
    model = cls._from_config(config, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MOST:
        raise RuntimeError(f"the names of its options do not tell how to make it small: it has {size:,} parameters")
    return model.float(), _batch(family, model)


def small_config(cls: Any) -> Any:
    """Make a small configuration of a class, and of the classes that it is made of."""
    defaults = cls()
    options = dict(_small_options(defaults)) | EXCEPTIONS.get(cls.model_type, {})
    return cls(**options)


def _small_options(defaults: Any) -> Iterator[tuple[str, Any]]:
    from transformers import PretrainedConfig

    names = {name for name in vars(defaults) if not name.startswith("_")} | {"num_labels"}
    token = VOCABULARY - 1
    for name in sorted(names):
        try:
            value = getattr(defaults, name, None)
        except Exception:  # an option of each layer
            continue
        if isinstance(value, PretrainedConfig):
            yield name, {**small_config(type(value)).to_dict()}
        elif name == "num_labels":
            yield name, 4
        elif isinstance(value, float) and _NOTHING.fullmatch(name):
            yield name, 0.0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            yield name, token
            token -= 1
        elif name == "num_key_value_heads" and (value is None or "kv_lora_rank" in names):
            yield name, 4
        elif isinstance(value, int) and not isinstance(value, bool):
            yield from ((name, small) for pattern, small in _SMALL.items() if re.fullmatch(pattern, name))
        elif isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
            yield from _small_list(name, value)


def _small_list(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    count = len(values)
    if re.fullmatch(r"(num_)?depths|layer_depths|stage_depths|num_layers|layers|stage_num_blocks|depth", name):
        yield name, [1] * count
    elif re.fullmatch(r".*hidden_sizes|embed_dims?|widths|neck_hidden_sizes|dim|stage_.*channels|channels", name):
        yield name, [16 * 2**i for i in range(count)] if values[0] != values[-1] else [32] * count
    elif re.fullmatch(r"num_attention_heads|num_heads|n_heads", name):
        yield name, [2] * count


def _batch(family: Family, model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    config = model.config
    if family.kind == "vision":
        size = getattr(config, "image_size", 64)
        size = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", getattr(config, "in_channels", 3))
        pixels = torch.randn(BATCH, channels, *size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 4, (BATCH,), generator=generator)}
    tokens = torch.randint(20, TOKENS, (BATCH, LENGTH), generator=generator)
    labels = tokens if family.kind != "seq2seq" else torch.randint(20, TOKENS, (BATCH, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": labels}


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the model's own loss."""
    loss = model(**batch).loss
    if loss is None or loss.ndim:
        raise RuntimeError("the model returns no loss")
    return loss


NORM = 1.0


def train(
    model: nn.Module, batch: dict[str, torch.Tensor], clip: Callable[[float], Any], value: Callable[[Any], float]
) -> list[float]:
    """Step twice, and return each step's loss and gradient norm."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        norm = clip(NORM)
        optimizer.step()
        found += [value(loss), value(norm)]
    return found
