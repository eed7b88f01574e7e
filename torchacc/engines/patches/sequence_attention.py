"""Attention over all tokens for models of transformers whose samples are split over devices.

Each device computes some of the heads for all tokens (DeepSpeed-Ulysses, Jacobs et al., 2023): queries, keys and values
come with a part of the tokens and all heads, and are exchanged. Where there are more devices than heads are split over,
they are in groups, each of which computes the queries of other tokens. Under a causal mask keys and values go from one
group to the next, in a ring; under another mask, and with dropout, they are gathered from all groups (as for Llama 3,
Grattafiori et al., 2024). Masks are those of all tokens, made by transformers.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from math import gcd
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from torchacc.engines.forward_inputs import CACHES
from torchacc.errors import EngineError
from torchacc.parallel.sequence_split import SequenceSplit, chunks_of, in_order

_PREFIX = "torchacc_sequence_over_"
"""How the names of implementations begin, in transformers' tables: there is one for each group of devices."""
_IS_ENABLED = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,  # these are of all devices
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


@dataclass(frozen=True)
class AttentionGroups:
    """How the devices that share a sample share its attention."""

    ranks: Sequence[int]
    """These devices."""
    num_parts: int
    """Devices over which the heads of the same queries are split: a group."""
    num_groups: int
    """Groups of devices, each with other queries."""
    group: int
    """Which of the groups this device is in."""
    all_to_all: Callable[[torch.Tensor, int, int], torch.Tensor]
    """Splits one dimension of a tensor over the devices of a group, and puts another one together."""
    all_gather: Callable[[torch.Tensor, int], torch.Tensor]
    """Puts a dimension of a tensor together from the devices of all groups that have the same heads."""
    attend_in_ring: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor | None]
    """Returns causal attention to the tokens of all groups, whose keys and values are never all here; None, on all
    devices, where no kernel can. Takes queries, keys, values, and the scale of scores."""


@dataclass(frozen=True)
class SplitForward:
    """A forward that runs on a part of each sample."""

    split: SequenceSplit
    position_ids: torch.Tensor | None
    """The position ids of all tokens; None for a plain range."""


UNSPLIT = "unsplit"
"""In place of a `SplitForward`: each device computes all tokens."""

_running: ContextVar[SplitForward | str | None] = ContextVar("sequence", default=None)


@contextmanager
def running(forward: SplitForward | str) -> Iterator[None]:
    """Context manager in which a model's forward runs on its part, or on `UNSPLIT` samples."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


def register(groups: AttentionGroups) -> str:
    """Give transformers the implementation, and return its name.

    Args:
        groups: How the devices that share a sample share its attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = _PREFIX + "_".join(map(str, groups.ranks)) + f"_by_{groups.num_parts}"
    # Between the graphs of a compiled layer: what it exchanges no compiler makes faster.
    attend = torch.compiler.disable(functools.partial(_attend, groups), reason="attention over split samples")
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _make_mask)
    return name


def make_masks_of_all_tokens(model: nn.Module) -> None:
    """Patch transformers to make masks of all tokens for our implementation, in the modules of a model's classes."""
    for module in {sys.modules[base.__module__] for part in model.modules() for base in type(part).__mro__}:
        if module.__name__.startswith("transformers.models."):
            _replace_makers(module)


def _replace_makers(module: ModuleType) -> None:
    makers = vars(sys.modules["transformers.masking_utils"])
    names = [name for name, own in vars(module).items() if name.startswith("create_") and makers.get(name) is own]
    for name in names:
        setattr(module, name, _of_all_tokens(makers[name]))


def _of_all_tokens(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a mask of all tokens where it is asked for that of a part."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def make(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        forward = _running.get()
        if not str(bound.arguments["config"]._attn_implementation).startswith(_PREFIX) or forward == UNSPLIT:
            return own(*args, **kwargs)
        if not isinstance(forward, SplitForward):
            raise EngineError(
                "a part of a model whose samples are split over devices (config.dist.sp.size) was called by itself, or "
                "is recomputed with the masks that it makes: call the whole model; with memory.gc name the "
                "classes of the layers in config.memory.gc_cls. Another model that has its config needs "
                "set_attn_implementation('sdpa')"
            )
        _ask_for_all_tokens(bound.arguments, forward)
        mask = own(*bound.args, **bound.kwargs)
        return forward.split.queries(mask) if isinstance(mask, torch.Tensor) else mask

    return make


def _ask_for_all_tokens(given: dict[str, Any], forward: SplitForward) -> None:
    """Change the arguments of a function that makes a mask from those of a part to those of all tokens.

    Raises:
        EngineError: There are others, or they are of another length.
    """
    unknown = [name for name, value in given.items() if name not in _MASK_ARGUMENTS and value is not None]
    if unknown:
        raise EngineError(
            f"config.dist.sp.size: the model makes its mask with {unknown[0]!r}, which is of a part of the tokens: "
            "set config.dist.sp.size = 1"
        )
    part = given["inputs_embeds"]
    if part.shape[1] != forward.split.part_length:
        raise EngineError(
            f"config.dist.sp.size: a mask is asked for {part.shape[1]} tokens, where this device has "
            f"{forward.split.part_length}: set config.dist.sp.size = 1"
        )
    # Only its shape, dtype and device are asked for.
    given["inputs_embeds"] = part.detach()[:, :1, :1].expand(len(part), forward.split.length, 1)
    if "position_ids" in given:
        given["position_ids"] = forward.position_ids


_MASK_ARGUMENTS = ("config", "inputs_embeds", "attention_mask", "position_ids", *CACHES)


def _make_mask(**kwargs: Any) -> torch.Tensor | None:
    from transformers.masking_utils import sdpa_mask

    forward = _running.get()
    if isinstance(forward, SplitForward):
        if kwargs["q_length"] != forward.split.length or kwargs["kv_length"] != forward.split.length:
            raise EngineError(
                f"config.dist.sp.size: a mask has {kwargs['q_length']} x {kwargs['kv_length']} tokens, and the samples "
                f"have {forward.split.length}: pass an attention_mask as long as the input"
            )
        if forward.split.is_padded:  # padding is behind all that a causal mask shows, and needs a mask elsewhere
            kwargs["allow_is_bidirectional_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(**kwargs)
    return mask


def _attend(
    groups: AttentionGroups,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to all tokens with some of the heads. Queries, keys and values are of shape (rows, heads, tokens, size).

    Returns:
        What transformers' implementations return: the output, of shape (rows, tokens, heads, size), and no weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    forward = _running.get()
    if forward == UNSPLIT:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    if forward is None and torch._C._current_graph_task_id() == -1:
        raise EngineError(
            "a layer of a model whose samples are split over devices (config.dist.sp.size) was called by itself: "
            "call the whole model"
        )
    if key.shape[2] != query.shape[2] or kwargs.get("position_bias") is not None:
        raise EngineError(
            f"config.dist.sp.size: the attention of {type(module).__name__} is over other tokens than its own, or has "
            "a bias of positions: set config.dist.sp.size = 1"
        )
    _check_mask_of_all_heads(attention_mask)
    heads, kv_heads = query.shape[1], key.shape[1]
    # As many copies of each key and value as let every device have those of its queries.
    copies = groups.num_parts // gcd(kv_heads, groups.num_parts)
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    if groups.num_parts > 1:
        query, key, value = (groups.all_to_all(each, 1, 2) for each in (query, key, value))
    own = SimpleNamespace(
        is_causal=getattr(module, "is_causal", True), num_key_value_groups=heads // (kv_heads * copies)
    )
    is_padded = isinstance(forward, SplitForward) and forward.split.is_padded
    if is_padded and attention_mask is None and not _is_causal(own, kwargs):
        raise EngineError(
            f"config.dist.sp.size: {type(module).__name__} attends to later tokens, too (is_causal = False), and the "
            "samples are not a multiple of the devices that share them: pad them, as config.dataloader.buckets does"
        )
    if groups.num_groups > 1:
        output = _attend_over_groups(groups, own, query, key, value, attention_mask, **kwargs)
    else:
        output = _attend_from(groups, own, query, key, value, attention_mask, **kwargs)
    return groups.all_to_all(output, 1, 2) if groups.num_parts > 1 else output, None


def _attend_over_groups(
    groups: AttentionGroups,
    own: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend from the queries of a group to all tokens: in a ring, or to keys that are gathered where that cannot be.

    Those are gathered again for backward, as keeping them would take the memory that is saved.
    """
    if mask is None and not kwargs.get("dropout") and _is_causal(own, kwargs):
        output = groups.attend_in_ring(query, key, value, kwargs.get("scaling"))
        if output is not None:
            return output.transpose(1, 2)
    attend = functools.partial(_attend_from, groups, own, **kwargs)
    in_backward = functools.partial(_in_backward_by, _enabled_backends())
    gathered: torch.Tensor = checkpoint(attend, query, key, value, mask, use_reentrant=False, context_fn=in_backward)
    return gathered


def _enabled_backends() -> list[SDPBackend]:
    return [backend for backend, is_enabled in _IS_ENABLED.items() if is_enabled()]


def _in_backward_by(backends: list[SDPBackend]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts for forward and for backward, which runs when the choice of `compute.attention` has ended."""
    return nullcontext(), sdpa_kernel(backends)


def _attend_from(
    groups: AttentionGroups,
    own: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend from the queries of a group to all tokens, with the heads of this device."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    key, value = _of_all_groups(groups, key, value)
    if mask is not None:  # it has no padding of the split in its keys
        key, value = (each[:, :, : mask.shape[-1]] for each in (key, value))
    if mask is not None or groups.num_groups == 1 or not _is_causal(own, kwargs):
        return sdpa_attention_forward(own, query, key, value, mask, **kwargs)[0]  # type: ignore[no-any-return]
    outputs = []
    for chunk, part in zip(chunks_of(groups.group, groups.num_groups), query.chunk(2, 2), strict=True):
        num_tokens = part.shape[2]
        seen = (chunk + 1) * num_tokens
        causal = causal_lower_right(num_tokens, seen) if num_tokens > 1 else None  # a single query sees all of these
        outputs.append(sdpa_attention_forward(own, part, key[:, :, :seen], value[:, :, :seen], causal, **kwargs)[0])
    return torch.cat(outputs, 1)


def _is_causal(own: Any, options: Mapping[str, Any]) -> bool:
    """Return whether attention without a mask is to earlier tokens only, as transformers decides it."""
    is_causal = options.get("is_causal")
    return bool(own.is_causal if is_causal is None else is_causal)


def _of_all_groups(
    groups: AttentionGroups, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of all tokens, in their order, from those of each group."""
    if groups.num_groups == 1:
        return key, value
    sizes = key.shape[-1], value.shape[-1]
    joined = in_order(groups.all_gather(torch.cat([key, value], -1), 2), groups.num_groups, 2)
    key, value = joined.split(sizes, -1)
    return key, value


def _check_mask_of_all_heads(mask: torch.Tensor | None) -> None:
    if mask is not None and (mask.dim() != 4 or mask.shape[1] != 1):
        raise EngineError(
            f"config.dist.sp.size: an attention mask of shape {tuple(mask.shape)}, where the heads are split over "
            "devices: pass one for all heads, of shape (rows, 1, tokens, tokens)"
        )
