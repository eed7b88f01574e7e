"""Set other attention kernels in models of transformers, through transformers' attention interface."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from torchacc.engines.patches.versions import PATCHES, is_for_installed
from torchacc.errors import EngineError, in_one_line

EAGER, SDPA, FLEX = "eager", "sdpa", "flex_attention"
"""Implementations, by their names in transformers."""
LIBRARY = "transformers."
"""How the names of the library's modules begin."""
SPLIT_FAMILIES = (
    "apertus",
    "arcee",
    "bitnet",
    "cohere",
    "cohere2",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "jais2",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Families that tests show to match the unsharded run, with samples or layers split, by transformers' `model_type`."""
PREDICTS_NEXT_TOKENS = ("ForCausalLM", "LMHeadModel")
"""How the classes end that predict each next token."""

_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_dropout", "attn_pdrop", "dropout_rate")
"""Names that configs of transformers have for the dropout of attention's weights."""


def models_of(model: nn.Module) -> list[Any]:
    """Return the outermost models of transformers in a model: itself, where it is one."""
    modeling = sys.modules.get("transformers.modeling_utils")  # which whoever has such a model has imported
    if modeling is None:
        return []
    found: list[Any] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, modeling.PreTrainedModel):
            found.append(module)
        else:
            waiting += module.children()
    return found


def why_it_cannot(model: Any, name: str) -> str | None:
    """Return why a model of transformers cannot compute attention by an implementation; None where it can.

    Args:
        model: The model; it is only read.
        name: The implementation.
    """
    if not is_for_installed("transformers_attention"):
        return f"torchacc knows how with transformers{PATCHES['transformers_attention'].versions} only"
    for module in _parts(model):
        if not module._can_set_attn_implementation():
            return f"{type(module).__name__} does not call transformers' AttentionInterface"
        try:
            module.get_correct_attn_implementation(name, is_init_check=True)
        except (ValueError, ImportError) as error:
            return in_one_line(error).partition(". ")[0].rstrip(".")
    return None


def dropout_of(model: Any) -> str | None:
    """Return what a model's configs say of attention's dropout, such as `attn_pdrop = 0.1`; None where it has none."""
    for module in _parts(model):
        for name in _DROPOUTS:
            share = getattr(module.config, name, None)
            if isinstance(share, int | float) and share > 0:
                return f"{name} = {share}"
    return None


def choose(model: Any, name: str) -> None:
    """Set the attention implementation of a model of transformers, and of all models in it."""
    model.set_attn_implementation(name)
    if name == FLEX:
        _trace_scores_outside_of_recompute()
        _let_flex_train_on_a_cpu()


def chosen(model: Any) -> str | None:
    """Return the implementation by which a model of transformers computes attention, by its name."""
    name: str | None = model.config._attn_implementation
    return name


def has_loss_of_next_tokens(model: Any) -> bool:
    """Return whether a model of transformers computes the library's own mean over the next tokens."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss


def refuse_packed_documents(model: Any, name: str) -> None:
    """Refuse position ids that begin anew within a row, which transformers' FlashAttention looks across."""
    model.register_forward_pre_hook(partial(_refuse_packed, name=name), with_kwargs=True)


def refuse_masks(model: Any, name: str) -> None:
    """Refuse a script's own masks, of each query and key, that transformers would apply wrongly by a kernel."""
    model.register_forward_pre_hook(partial(_refuse_masks, name=name), with_kwargs=True)


def _parts(model: Any) -> Iterator[Any]:
    kind = sys.modules["transformers.modeling_utils"].PreTrainedModel
    return (module for module in model.modules() if isinstance(module, kind))


def _refuse_packed(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> None:
    given = _given(model, args, kwargs)
    positions = given.get("position_ids")
    if positions is None or given.get("attention_mask") is not None or positions.dim() > 2:
        return  # with a mask no implementation of transformers looks at where documents begin
    if bool((torch.diff(positions, dim=-1) != 1).any()):
        raise EngineError(
            f"compute.attention = {name!r}: the position ids begin anew within a row, so that it holds several "
            "documents, and transformers' FlashAttention would let tokens see those before their own: take "
            "'flex_attention' or 'sdpa', which keep documents apart"
        )


def _refuse_masks(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str) -> None:
    for key, mask in _given(model, args, kwargs).items():
        if not key.endswith("attention_mask") or not isinstance(mask, torch.Tensor) or mask.dim() != 4:
            continue
        why = None
        if name not in (EAGER, FLEX):
            why = "it has four dimensions, and FlashAttention takes none but of padding"
        elif mask.dtype == torch.bool:
            why = "it is boolean, and transformers would add 0 and 1 to the scores: pass -inf for False and 0 for True"
        elif name == FLEX and mask.shape[1] != 1:
            why = "it differs between heads, and transformers would take that of the first for all"
        if why is not None:
            raise EngineError(f"compute.attention = {name!r} cannot apply the {key}: {why}, or take 'sdpa'")


def _given(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a forward is given, by the names of its arguments."""
    return {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}


@cache
def _trace_scores_outside_of_recompute() -> None:
    """Patch PyTorch to differentiate a change of scores, such as a soft cap, also in a module that is recomputed.

    It runs forward and backward of the change to see what they are. In such a module its saved tensors would be dropped
    as the module's own are, and the module be recomputed to have them back, in the midst of its first run.
    """
    operation = importlib.import_module("torch._higher_order_ops.flex_attention")
    own = operation.create_fw_bw_graph

    def create(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
            return own(*args, **kwargs)

    operation.create_fw_bw_graph = create  # type: ignore[attr-defined]


def _unchanged(saved: Any) -> Any:
    return saved


@cache
def _let_flex_train_on_a_cpu() -> None:
    """Run flex attention as operations of PyTorch on a CPU, for which the compiler has no backward of it.

    On all other devices it stays what transformers has registered, but for what has one row for all samples.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations import flex_attention
    from transformers.masking_utils import flex_attention_mask

    AttentionInterface.register(FLEX, _uncompiled_on_a_cpu(flex_attention))
    AttentionMaskInterface.register(FLEX, _mask_uncompiled_on_a_cpu(flex_attention_mask))


def _uncompiled_on_a_cpu(library: Any) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    own = library.flex_attention_forward

    def run_eagerly(query: Any, key: Any, value: Any, training: bool = False, **kwargs: Any) -> Any:
        return flex_attention(query, key, value, **kwargs)

    def attend(module: nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        # Of T5's positions, and of a mask, there may be one row for all samples: transformers reads one for each.
        bias = kwargs.get("position_bias")
        if bias is not None:
            kwargs["position_bias"] = bias.expand(len(query), -1, -1, -1)
        if isinstance(attention_mask, torch.Tensor):
            attention_mask = attention_mask.expand(len(query), -1, -1, -1)
        if query.device.type != "cpu" or torch.compiler.is_dynamo_compiling():
            return own(module, query, key, value, attention_mask, **kwargs)
        with _replaced(library, "compile_friendly_flex_attention", run_eagerly):
            return own(module, query, key, value, attention_mask, **kwargs)

    return attend


def _mask_uncompiled_on_a_cpu(own: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, device: torch.device | str = "cpu", **kwargs: Any) -> Any:
        if torch.device(device).type != "cpu" or torch.compiler.is_dynamo_compiling():
            return own(*args, device=device, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return own(*args, device=device, **kwargs)

    return make


@contextmanager
def _replaced(library: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    original = getattr(library, name)
    setattr(library, name, function)
    try:
        yield
    finally:
        setattr(library, name, original)
