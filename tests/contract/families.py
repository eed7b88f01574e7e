"""Every family of models that transformers can build small: its configuration, a model, and a batch that fits it."""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
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
    "longcat_flash": {
        "num_layers": 2,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "qk_head_dim": 16,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "hidden_size": 32}
    | {"attn_layers": ["local", "local"]},
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
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "attention_hidden_size": 64},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "attention_hidden_size": 64},
    "esmc": {"num_key_value_heads": None},
    "encoder-decoder": {"decoder_start_token_id": 0, "pad_token_id": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
    "neomme": {"head_dim": 16, "hidden_size": 64},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2, "train_size": [16, 16]},
    "swin": {"patch_size": 2, "window_size": 4},
    "donut-swin": {"patch_size": 2, "window_size": 4},
    "levit": {"patch_size": 16},
    "siglip2_vision_model": {"num_patches": 64},
    "textnet": {"stem_out_channels": 16, "image_size": [64, 64]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "cvt": {"depth": [1, 2, 3]},
    "mobilevit": {"patch_size": 2, "neck_hidden_sizes": [16, 16, 16, 16, 32, 32, 64]},
    "mobilevitv2": {"patch_size": 2, "width_multiplier": 0.25},
    "hgnet_v2": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 16, 32, 64],
        "stage_mid_channels": [16, 16, 32, 32],
        "stage_out_channels": [16, 32, 64, 128],
        "stage_numb_of_layers": [1, 1, 1, 1],
    },
    "masked-reformer": {"is_decoder": False},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_local_encoder": {"hidden_size_global": 32},
    "blt_local_decoder": {"hidden_size_global": 32},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "head_dim": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "use_sliding_window": False,
    },
    "granite_speech_encoder": {"hidden_dim": 32},
    "granite_speech_plus_encoder": {"hidden_dim": 32},
    "nemotron3_diarization": {"head_config": {"hidden_size": 32, "audio_hidden_size": 32}},
}
"""Name of a family's configuration, or of a family -> options of a small one that the names do not tell."""

LENGTHS = {"reformer": 16, "perceiver": 64}
"""Model type -> tokens in a row, where not every length will do."""

UNTRIED = {
    "gemma4_assistant": "it drafts for another model, from that one's keys and values",
    "gemma4_unified_assistant": "it drafts for another model, from that one's keys and values",
    "shieldgemma2": "it returns no loss",
    "vibevoice_asr": "no option makes it smaller than 171 million parameters",
}
"""Model type -> why it is not tried."""


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

    if family.model_type in UNTRIED:
        raise RuntimeError(UNTRIED[family.model_type])
    cls: Any = getattr(transformers, family.model_class)
    config = small_config(cls.config_class, EXCEPTIONS.get(family.name, {}))
    config.use_cache = False
    torch.manual_seed(1)
    model = cls._from_config(config, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _break_ties(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > MOST:
        raise RuntimeError(f"the names of its options do not tell how to make it small: it has {size:,} parameters")
    return model.float(), _batch(family, model)


def _break_ties(model: nn.Module) -> None:
    """Give routers of zeros other weights: which of equal experts comes first is no question of right or wrong."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and re.search("router|gate", name) and not parameter.any():
            nn.init.normal_(parameter, std=0.02)


def small_config(cls: Any, more: Mapping[str, Any] = {}) -> Any:
    """Make a small configuration of a class, and of the classes that it is made of."""
    defaults = cls()
    options = dict(_small_options(defaults)) | EXCEPTIONS.get(cls.model_type, {}) | more
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
    shape = (BATCH, LENGTHS.get(family.model_type, LENGTH))
    if family.kind == "vision":
        inputs = {"pixel_values": _pixels(config, generator)}
        labels = torch.randint(0, 4, (BATCH,), generator=generator)
    else:
        inputs = {"input_ids": torch.randint(20, TOKENS, shape, generator=generator)}
        other = family.kind == "seq2seq"
        labels = torch.randint(20, TOKENS, shape, generator=generator) if other else inputs["input_ids"]
    own = _INPUTS.get(family.name, lambda *_: {})(config, generator)
    return {name: tensor for name, tensor in ({**inputs, "labels": labels} | own).items() if tensor is not None}


def _pixels(config: Any, generator: torch.Generator) -> torch.Tensor:
    size = getattr(config, "image_size", 64)
    size = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", getattr(config, "in_channels", 3))
    return torch.randn(BATCH, channels, *size, generator=generator)


def _of_codebooks(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    inputs = torch.randint(20, TOKENS, (BATCH, 4, LENGTH), generator=generator)
    return {"input_ids": inputs.flatten(0, 1), "labels": inputs.transpose(1, 2).contiguous()}


def _of_colours(config: Any, generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": torch.randint(20, TOKENS, (BATCH, LENGTH), generator=generator), "pixel_values": None}


def _of_patches(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = torch.randn(BATCH, 64, 3 * 8 * 8, generator=generator)
    mask, shapes = torch.ones(BATCH, 64, dtype=torch.long), torch.full((BATCH, 2), 8)
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _with_sound(config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    frames = LENGTH * config.audio_length_per_tok
    return {"input_features": torch.randn(BATCH, config.audio_config.num_mel_bins, frames, generator=generator)}


_INPUTS: dict[str, Callable[[Any, torch.Generator], dict[str, Any]]] = {
    "causal-git": lambda config, generator: {"pixel_values": _pixels(config.vision_config, generator)},
    "causal-musicgen": _of_codebooks,
    "causal-musicgen_melody": _of_codebooks,
    "vision-imagegpt": _of_colours,
    "vision-siglip2": _of_patches,
    "seq2seq-voxtral_realtime": _with_sound,
}
"""Name of a family -> what its batch has beside tokens or pixels, or in their place."""


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the model's own loss."""
    loss = getattr(model(**batch), "loss", None)
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
