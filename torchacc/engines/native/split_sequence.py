"""Split each sample along its length over devices (context parallelism): models of transformers run on their parts.

Each device passes in, and gets back, all tokens; inside of the model it computes only its part. Position ids are made,
and labels shifted, before the split; attention is `sequence_attention`'s.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchacc.config import Config
from torchacc.data import digest_of, tensors_in
from torchacc.engines.forward_inputs import CACHES, inputs_by_name
from torchacc.engines.native.missing_output import MissingOutput
from torchacc.engines.native.ring_attention import Ring, attend_in_ring
from torchacc.engines.native.sequence_collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    gather_tokens,
    pass_on,
    scatter_tokens,
)
from torchacc.engines.option_conflicts import refuse_beside
from torchacc.engines.patches import sequence_attention, transformers_attention
from torchacc.engines.patches.sequence_attention import UNSPLIT, AttentionGroups, SplitForward
from torchacc.engines.patches.versions import PATCHES, is_for_installed
from torchacc.engines.process_group import ProcessGroup
from torchacc.errors import ConfigError, DataError, EngineError
from torchacc.logging import get_logger
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sequence_split import IGNORE_INDEX, SequenceSplit, head_parts, next_labels

_log = get_logger(__name__)

_KERNELS = ("auto", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math")
_ROTATIONS_OF_A_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on how many tokens there are."""
_TOKENWISE = (
    transformers_attention.LIBRARY,
    "peft.",
    "torch.nn.modules.activation",
    "torch.nn.modules.container",
    "torch.nn.modules.dropout",
    "torch.nn.modules.linear",
    "torch.nn.modules.normalization",
    "torch.nn.modules.sparse",
)
"""Packages whose modules treat each token by itself, attention of the supported families aside."""
_SPLIT_INPUTS = ("input_ids", "position_ids", "token_type_ids", "inputs_embeds")
_JOINED_OUTPUTS = ("logits", "last_hidden_state", "hidden_states")
_WITHOUT = "or set config.dist.sp.size = 1"
_COMPARED_FORWARDS = 2
"""Number of first forwards, in training and in evaluation each, whose inputs are compared between devices."""


def check(config: Config, mesh: Mesh, model: nn.Module) -> None:
    """Refuse what would not compute the unsharded numbers.

    Args:
        config: A resolved config.
        mesh: Its mesh.
        model: The model; it is only read.

    Raises:
        ConfigError: It would not.
    """
    size = mesh.size(Role.SEQUENCE)
    asked, compute = f"config.dist.sp.size = {size}", config.compute
    refused = {
        f"config.compute.attention = {compute.attention!r}": compute.attention not in _KERNELS,
    }
    refuse_beside(asked, refused)
    if type(model) is nn.Module:  # the trainer asks before it has a model
        return
    models = transformers_attention.models_of(model)
    if not models:
        raise ConfigError(
            f"{asked}: {type(model).__name__} holds no model of transformers. Samples are split along their length in "
            "those only, as attention has to reach the tokens of other devices: use config.dist.fsdp.size"
        )
    for each in models:
        why = _why_it_cannot(each)
        if why is not None:
            raise ConfigError(f"{asked} with {type(each).__name__}: {why}. Use config.dist.fsdp.size")
    head_parts(_heads(models), size, mesh.size(Role.TENSOR), config.dist.sp.ring_size)


def _heads(models: Sequence[Any]) -> list[int]:
    return [each.config.num_attention_heads for each in models]


def _why_it_cannot(model: Any) -> str | None:
    """Return why a model of transformers cannot run on a part of each sample; None where it can."""
    if not is_for_installed("sequence_attention"):
        return f"torchacc knows how with transformers{PATCHES['sequence_attention'].versions} only"
    config, forward = model.config, inspect.unwrap(type(model).forward)
    if config.model_type not in transformers_attention.SPLIT_FAMILIES:
        known = ", ".join(transformers_attention.SPLIT_FAMILIES)
        return f"the families whose samples are split are {known}, and this is {config.model_type!r}"
    if not forward.__module__.startswith(transformers_attention.LIBRARY):
        return f"its forward is the script's own ({forward.__module__}), which may look at tokens of other devices"
    if not (type(model).__name__.endswith(transformers_attention.PREDICTS_NEXT_TOKENS) or model.base_model is model):
        return "its head looks at single tokens, or at pairs of them, which may be on another device"
    if model.base_model is not model and not transformers_attention.has_loss_of_next_tokens(model):
        return (
            "its loss_function is not transformers' loss of causal language models, and may shift the labels of a part "
            "again, or divide by their number: compute the loss from the logits of a call without labels"
        )
    other = next((type(part) for part in model.modules() if not _looks_at_one_token(part)), None)
    if other is not None:
        return (
            f"it has a {other.__name__} of {other.__module__}, which may look at tokens of other devices. Known are "
            "the modules of transformers, peft and PyTorch's layers of single tokens"
        )
    is_causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
    if not is_causal or getattr(config, "add_cross_attention", False):
        return "its attention is not causal, or is over another model's tokens, too"
    rotation = _rotation_of_a_length(config)
    if rotation is not None:
        return f"its rotary embeddings ({rotation!r}) depend on the number of tokens, of which a device has a part"
    if getattr(config, "output_router_logits", False):
        return "the loss that balances its experts (output_router_logits) is over all tokens: set it to False"
    return None


def _rotation_of_a_length(config: Any) -> str | None:
    """Return the kind of rotary embeddings that depend on the number of tokens, of any kind of layer; None without."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (parameters, *parameters.values()) if isinstance(each, Mapping)}
    return next(iter(kinds.intersection(_ROTATIONS_OF_A_LENGTH)), None)


def _looks_at_one_token(module: nn.Module) -> bool:
    """Return whether a module computes each token by itself, or is one of the library's."""
    return type(module).__module__.startswith(_TOKENWISE) and not isinstance(module, nn.MultiheadAttention)


def install(
    model: nn.Module,
    mesh: Mesh,
    processes: ProcessGroup,
    ring_size: int | None,
    returns_outputs: Callable[[], bool],
) -> str | None:
    """Replace the forwards of transformers' models by ones on this device's part of each sample. Collective.

    Args:
        model: A model that `check()` has passed.
        mesh: The mesh.
        processes: The job's.
        ring_size: In how many groups of devices attention is computed; None for as few as can be.
        returns_outputs: Says whether the forward that runs returns outputs that are put together.

    Returns:
        The name that transformers has for attention to the tokens of all devices that share a sample, for
        `choose_attention()`; None where nobody shares samples.
    """
    group = processes.own_subgroup(mesh.groups(Role.SEQUENCE))
    if group is None:
        return None
    groups, index = _attention_groups(model, mesh, processes, ring_size), mesh.index(processes.job.rank, Role.SEQUENCE)
    name = sequence_attention.register(groups)
    for each in transformers_attention.models_of(model):
        sequence_attention.make_masks_of_all_tokens(each)
        _SplitModel(each, index, group, name, groups.num_groups, returns_outputs).install()
    shared = [f"its heads split over {groups.num_parts}"] * (groups.num_parts > 1)
    shared += [f"its queries over {groups.num_groups} groups"] * (groups.num_groups > 1)
    _log.info("attention: sdpa, %s of the devices that share a sample", " and ".join(shared))
    return name


def _attention_groups(model: nn.Module, mesh: Mesh, processes: ProcessGroup, ring_size: int | None) -> AttentionGroups:
    """Return how the devices that share a sample share its attention. Collective: makes their groups."""
    size, samples = mesh.size(Role.SEQUENCE), mesh.groups(Role.SEQUENCE)
    heads = _heads(transformers_attention.models_of(model))
    num_parts = head_parts(heads, size, mesh.size(Role.TENSOR), ring_size)
    of_heads = [ranks[start : start + num_parts] for ranks in samples for start in range(0, size, num_parts)]
    of_queries = [ranks[start::num_parts] for ranks in samples for start in range(num_parts)]
    ranks = next(ranks for ranks in samples if processes.job.rank in ranks)
    of_own = processes.own_subgroup(of_queries)
    group = ranks.index(processes.job.rank) // num_parts
    return AttentionGroups(
        ranks=ranks,
        num_parts=num_parts,
        num_groups=size // num_parts,
        group=group,
        all_to_all=functools.partial(_all_to_all, processes.own_subgroup(of_heads)),
        all_gather=functools.partial(_all_gather, of_own),
        attend_in_ring=functools.partial(_attend_in_ring, of_own, group),
    )


def choose_attention(model: nn.Module, name: str) -> None:
    """Set the attention of transformers' models to the implementation that `install()` returned."""
    for each in transformers_attention.models_of(model):
        transformers_attention.choose(each, name)


def _all_to_all(group: dist.ProcessGroup | None, tensor: torch.Tensor, split: int, joined: int) -> torch.Tensor:
    assert group is not None, "only several devices have an all-to-all"
    return all_to_all(tensor, group, split=split, joined=joined)


def _all_gather(group: dist.ProcessGroup | None, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    assert group is not None, "only several groups have an all-gather"
    return all_gather(tensor, group, dim)


def _attend_in_ring(group: dist.ProcessGroup | None, index: int, *tensors: Any) -> torch.Tensor | None:
    assert group is not None, "only several groups are a ring"
    return attend_in_ring(Ring(group.size(), index, functools.partial(pass_on, group=group, index=index)), *tensors)


@dataclass
class _Targets:
    """The labels of the forward that runs."""

    own: torch.Tensor
    """For each token of this part what is to be predicted."""
    num_counted: torch.Tensor
    """How many of all parts count."""
    are_counted: bool = False
    """Whether a loss has been computed of them."""


class _SplitModel:
    """A model of transformers that runs on a part of each sample.

    Args:
        model: The model.
        index: Which of the devices that share samples this is.
        group: Their processes.
        attention: The implementation of attention that reaches all of them.
        num_groups: In how many groups they compute it.
        returns_outputs: Says whether the forward that runs returns outputs that are put together.
    """

    def __init__(
        self,
        model: Any,
        index: int,
        group: dist.ProcessGroup,
        attention: str,
        num_groups: int,
        returns_outputs: Callable[[], bool],
    ) -> None:
        self._model = model
        self._size = group.size()
        self._index = index
        self._group = group
        self._attention = attention
        self._num_groups = num_groups
        self._returns_outputs = returns_outputs
        self._forward: Callable[..., Any] = model.forward
        self._signature = inspect.signature(model.forward)
        self._loss: Callable[..., torch.Tensor] = model.loss_function
        self._targets: _Targets | None = None
        self._left_to_compare = {True: _COMPARED_FORWARDS, False: _COMPARED_FORWARDS}

    def install(self) -> None:
        """Replace the model's forward and its loss."""
        self._model.loss_function = self._loss_of_all
        self._model.forward = functools.wraps(self._forward)(lambda *args, **kwargs: self._run(*args, **kwargs))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        given = inputs_by_name(self._signature, *args, **kwargs)
        chosen = transformers_attention.chosen(self._model)
        if chosen != self._attention:
            raise EngineError(
                f"{type(self._model).__name__} was given the attention {chosen!r} after accelerate(), "
                f"which reaches the tokens of this device only: leave it as it is, {_WITHOUT}"
            )
        if not self._is_to_be_split(given):
            with sequence_attention.running(UNSPLIT):
                return self._forward(**given)
        self._compare(given)
        is_tuple = given.pop("return_dict", None) is False
        try:
            split_inputs, forward = self._split(given)
            targets = self._targets
            with sequence_attention.running(forward):
                output = self._forward(**split_inputs, return_dict=True)
        finally:
            self._targets = None
        if targets is not None and not targets.are_counted and output.get("loss") is not None:
            raise self._refuse("labels, of which it computes a loss otherwise than by its loss_function")
        if not self._returns_outputs():
            return output
        full = self._full_output(output, forward.split, is_kept=targets is not None and torch.is_grad_enabled())
        if is_tuple:
            return full.to_tuple()
        if not torch.is_grad_enabled() and self._caches(given):
            full[next(name for name in reversed(CACHES) if hasattr(full, name))] = _NotCached()
        return full

    def _is_to_be_split(self, given: Mapping[str, Any]) -> bool:
        """Return whether a call runs on parts. Each device computes the calls of a generation on full samples.

        Raises:
            EngineError: It is for generation, and in training, or goes on from a call that kept no keys and values.
        """
        for cache in map(given.get, CACHES):
            if isinstance(cache, _NotCached):
                raise EngineError(cache.why)
        kept = given.get("logits_to_keep", 0)
        asked = [name for name in (*CACHES, "use_cache") if given.get(name) not in (None, False)]
        asked += ["logits_to_keep"] if isinstance(kept, torch.Tensor) or kept else []
        if not asked:
            return True
        if torch.is_grad_enabled():
            raise EngineError(
                f"{asked[0]} in a forward that records gradients, whose samples are split over {self._size} devices "
                f"(config.dist.sp.size): leave it out, call the model under torch.no_grad(), {_WITHOUT}"
            )
        return False

    def _compare(self, given: Mapping[str, Any]) -> None:
        """Check in the first forwards that the devices that share samples are given the same. Collective.

        Raises:
            DataError: They are not.
        """
        is_training = self._model.training
        if not self._left_to_compare[is_training]:
            return
        self._left_to_compare[is_training] -= 1
        own = digest_of([each.detach().cpu() for each in tensors_in(dict(given)) if not each.requires_grad])
        found: list[Any] = [None] * self._size
        dist.all_gather_object(found, own, group=self._group)
        if len(set(found)) > 1:
            raise DataError(
                f"the {self._size} devices that share each sample (config.dist.sp.size) have called "
                f"{type(self._model).__name__} with different inputs: each would compute a part of another sample. "
                "Hand the loader over to accelerate(), which gives them the same batch, and draw random numbers for "
                "it, as of masked tokens, before the loader or by a generator with the same seed on all ranks"
            )

    def _split(self, given: dict[str, Any]) -> tuple[dict[str, Any], SplitForward]:
        """Return the inputs of this part, and the forward that they are for.

        Raises:
            EngineError: There is an input of which it is not known how it is split.
        """
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
            raise self._refuse("a call without input_ids or inputs_embeds of shape (rows, tokens)")
        rows, length = tokens.shape[:2]
        of = SequenceSplit(length, self._size, self._index, self._num_groups)
        positions = given.get("position_ids")
        found = dict(given)
        found["position_ids"] = self._positions(positions, length, tokens.device)
        self._note_targets(found, of)
        for name, value in list(found.items()):
            if name in _SPLIT_INPUTS:
                self._check_length(name, value, length)
                found[name] = scatter_tokens(value, of, self._group) if value.requires_grad else of.part(value)
            elif name == "attention_mask":
                self._check_mask(value, rows, length)
            elif name == "num_items_in_batch" and self._targets is not None:
                self._targets.num_counted = torch.as_tensor(found.pop(name), device=tokens.device)
            elif name == "ignore_index" and value != IGNORE_INDEX:
                raise self._refuse(f"ignore_index = {value}, where the labels that do not count are {IGNORE_INDEX}")
            elif name == "output_attentions" and value:
                raise self._refuse("output_attentions = True, of which no device has all")
            elif name != "labels" and any(tensor.dim() for tensor in tensors_in(value)):
                raise self._refuse(f"the input {name!r}")
        return {**found, "use_cache": False}, SplitForward(of, None if self._caches(given) else positions)

    def _caches(self, given: Mapping[str, Any]) -> bool:
        """Return whether the unsharded model would cache keys and values, and so see no packed documents."""
        recomputes = self._model.training and getattr(self._model.base_model, "gradient_checkpointing", False)
        return bool(given.get("use_cache", self._model.config.use_cache)) and not recomputes

    def _positions(self, given: torch.Tensor | None, length: int, device: torch.device) -> torch.Tensor:
        if given is None:
            return torch.arange(length, device=device).unsqueeze(0)
        if given.dim() == 1:
            return given.unsqueeze(0)
        if given.dim() > 2:
            raise self._refuse(f"position_ids of shape {tuple(given.shape)}")
        return given

    def _note_targets(self, found: dict[str, Any], of: SequenceSplit) -> None:
        """Store the shifted labels, and pass this part's on, so that the model computes a loss."""
        self._targets = None
        labels, shifted = found.get("labels"), found.pop("shift_labels", None)
        if labels is None:  # then a model computes no loss
            return
        targets = next_labels(labels) if shifted is None else shifted
        for name, each in (("labels", labels), ("shift_labels", targets)):
            if each.dim() != 2 or each.shape[1] != of.length:
                raise self._refuse(f"{name} of shape {tuple(each.shape)} for {of.length} tokens")
        self._targets = _Targets(of.part(targets, IGNORE_INDEX), (targets != IGNORE_INDEX).sum())
        found["labels"] = self._targets.own

    def _check_length(self, name: str, value: torch.Tensor, length: int) -> None:
        if value.dim() < 2 or value.shape[1] != length:
            raise self._refuse(f"{name} of shape {tuple(value.shape)} for {length} tokens")

    def _check_mask(self, mask: Any, rows: int, length: int) -> None:
        shapes = [(rows, length), (rows, 1, length, length), (1, 1, length, length)]
        if not isinstance(mask, torch.Tensor) or tuple(mask.shape) not in shapes:
            what = f"of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else f"that is a {type(mask)}"
            raise self._refuse(f"an attention_mask {what} for {rows} rows of {length} tokens")

    def _refuse(self, what: str) -> EngineError:
        return EngineError(
            f"{type(self._model).__name__} with {what}, where samples are split over {self._size} devices "
            f"(config.dist.sp.size): leave it out, {_WITHOUT}"
        )

    def _loss_of_all(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand for the model's loss function: the sum of this part's, over the labels that count in all parts."""
        targets = self._targets
        if targets is None:
            return self._loss(logits, labels, *args, **kwargs)
        targets.are_counted = True
        kwargs |= {"num_items_in_batch": targets.num_counted, "shift_labels": targets.own}
        return all_reduce(self._loss(logits, targets.own, *args, **kwargs), self._group)

    def _full_output(self, output: Any, of: SequenceSplit, *, is_kept: bool) -> Any:
        """Put the parts of what the model returns together.

        Args:
            output: What it returns of this part.
            of: How samples are split.
            is_kept: Whether to return placeholders that raise when they are used.
        """
        for name, value in list(output.items()):
            if name in _JOINED_OUTPUTS:
                output[name] = _not_joined(name) if is_kept else self._joined(value, of)
            elif name != "loss":
                raise self._refuse(f"the output {name!r}")
        return output

    def _joined(self, value: Any, of: SequenceSplit) -> Any:
        if isinstance(value, tuple | list):
            return tuple(self._joined(each, of) for each in value)
        if not isinstance(value, torch.Tensor):  # the loss in chunks has no logits
            return value
        return gather_tokens(value, of, self._group)


def _not_joined(name: str) -> MissingOutput:
    """Stand for an output of which each device has computed a part, and that nobody has put together."""
    return MissingOutput(
        name,
        f"the {name} of a forward with labels are not put together, where samples are split over devices "
        "(config.dist.sp.size): they would take the memory that splitting saves. Call the model without labels "
        "and compute the loss from them, or under torch.no_grad()",
    )


class _NotCached(MissingOutput):
    """Stands for the keys and values that the unsharded model would have returned to generate with."""

    def __init__(self) -> None:
        super().__init__(
            "past_key_values",
            "the past_key_values of a forward whose samples are split over devices (config.dist.sp.size) were not "
            "kept: pass use_cache=True, also in the first call, or call generate()",
        )
