"""Decide which dimension of which parameter is split over the tensor-parallel axis, as plain data.

A plan is an ordered list of rules: a regular expression that is searched for in a parameter's names, and the mesh axis
of each of its dimensions. The first rule that fits decides; what no rule fits is not split. The plans of the main model
families are written down here; a user's own is `config.dist.tp.plan`; a transformers model of another family may
declare one itself.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from torchacc.errors import ConfigError
from torchacc.parallel.axes import ParameterSpec, Role, axes_in, axis_with
from torchacc.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torchacc.config.sections import TPConfig

_TP = axis_with(Role.TENSOR)


@dataclass(frozen=True)
class Rule:
    """How the parameters that a pattern fits are split."""

    pattern: str
    """A regular expression, searched for in a parameter's names."""
    spec: ParameterSpec
    """The axes of the last dimensions; those before them, such as that of experts, are not split."""
    count: str = ""
    """What else has to divide, such as the number of heads: the name of a number in the model's config."""
    may_stay_unsplit: bool = False
    """Whether each device has a parameter that does not divide in full, instead of the plan being refused."""
    style: str = ""
    """How a process computes with its part, in transformers' words where it has one: see `TensorParallelPlan.styles`.
    Derived from `spec` where it is empty."""


_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"
_BY_OUTPUT, _BY_INPUT = (_TP, None), (None, _TP)  # of a weight (output, input), as nn.Linear and nn.Embedding have it
SUMMED_GRADIENT = "replicated_with_grad_allreduce"
"""The style of a weight that each process has in full, and whose gradients of all processes are added up."""
SHARED_HEADS = "shared_heads"
"""The style of projections to fewer key-value heads than devices: several compute with the same head."""
_GATHERED = "colwise_gather_output"
_EXPERTS = "moe_tp_experts"
_VOCABULARY = Rule(r"(embed_tokens|lm_head)\.weight$", _BY_OUTPUT, may_stay_unsplit=True, style=_GATHERED)

_LLAMA = (
    _VOCABULARY,
    Rule(r"\.q_proj\.weight$", _BY_OUTPUT, _HEADS),
    Rule(r"\.q_proj\.bias$", (_TP,), _HEADS),
    Rule(r"\.[kv]_proj\.weight$", _BY_OUTPUT, _KV_HEADS, may_stay_unsplit=True),
    Rule(r"\.[kv]_proj\.bias$", (_TP,), _KV_HEADS, may_stay_unsplit=True),
    Rule(r"\.o_proj\.weight$", _BY_INPUT, _HEADS),
    Rule(r"\.(gate|up)_proj\.weight$", _BY_OUTPUT),
    Rule(r"\.(gate|up)_proj\.bias$", (_TP,)),
    Rule(r"\.down_proj\.weight$", _BY_INPUT),
)
_QWEN3 = (*_LLAMA, Rule(r"\.[qk]_norm\.weight$", (), style=SUMMED_GRADIENT))  # of each head: a process norms its own

_GPT2 = (  # whose Conv1D has its weight as (input, output)
    Rule(r"(wte|lm_head)\.weight$", _BY_OUTPUT, may_stay_unsplit=True, style=_GATHERED),
    Rule(r"\.c_attn\.weight$", _BY_INPUT, _HEADS, style="packed_colwise"),
    Rule(r"\.q_attn\.weight$", _BY_INPUT, _HEADS, style="colwise"),
    Rule(r"\.(c|q)_attn\.bias$", (_TP,), _HEADS),
    Rule(r"att(n|ention)\.c_proj\.weight$", _BY_OUTPUT, _HEADS, style="rowwise"),
    Rule(r"\.c_fc\.weight$", _BY_INPUT, style="colwise"),
    Rule(r"\.c_fc\.bias$", (_TP,)),
    Rule(r"\.mlp\.c_proj\.weight$", _BY_OUTPUT, style="rowwise"),
)
_BERT = (
    Rule(r"(word_embeddings|predictions\.decoder)\.weight$", _BY_OUTPUT, may_stay_unsplit=True, style=_GATHERED),
    Rule(r"\.(query|key|value)\.weight$", _BY_OUTPUT, _HEADS),
    Rule(r"\.(query|key|value)\.bias$", (_TP,), _HEADS),
    Rule(r"attention\.output\.dense\.weight$", _BY_INPUT, _HEADS),
    Rule(r"\.intermediate\.dense\.weight$", _BY_OUTPUT),
    Rule(r"\.intermediate\.dense\.bias$", (_TP,)),
    Rule(r"\.\d+\.output\.dense\.weight$", _BY_INPUT),
)
_T5 = (
    Rule(r"(shared|embed_tokens|lm_head)\.weight$", _BY_OUTPUT, may_stay_unsplit=True, style=_GATHERED),
    Rule(r"\.relative_attention_bias\.weight$", _BY_INPUT, _HEADS, style="colwise"),
    Rule(r"Attention\.[qkv]\.weight$", _BY_OUTPUT, _HEADS),
    Rule(r"Attention\.o\.weight$", _BY_INPUT, _HEADS),
    Rule(r"\.wi(_\d)?\.weight$", _BY_OUTPUT),
    Rule(r"\.wo\.weight$", _BY_INPUT),
)
_MIXTRAL = (
    *_LLAMA,
    Rule(r"\.experts\.gate_up_proj$", _BY_OUTPUT, style=_EXPERTS),
    Rule(r"\.experts\.down_proj$", _BY_INPUT, style=_EXPERTS),
)

FAMILIES: Mapping[str, Sequence[Rule]] = {
    "bert": _BERT,
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _MIXTRAL,
    "qwen2": _LLAMA,
    "qwen3": _QWEN3,
    "t5": _T5,
}
"""The plans of model families, by transformers' `model_type`."""

# transformers' words in the plans that its models declare. What is not named here is not split, which is never wrong
# where one program is partitioned.
_DECLARED = {
    "colwise": _BY_OUTPUT,
    "colwise_gather_output": _BY_OUTPUT,
    "colwise_rep": _BY_OUTPUT,
    "packed_colwise": _BY_OUTPUT,
    "rowwise": _BY_INPUT,
    "rowwise_rep": _BY_INPUT,
    "rowwise_split_input": _BY_INPUT,
    "packed_rowwise": _BY_INPUT,
    "embedding_rowwise": _BY_OUTPUT,
    "embedding_colwise": _BY_INPUT,
    SUMMED_GRADIENT: (),
    "mla_kv_a_proj": (),
}


@dataclass(frozen=True)
class TensorParallelPlan:
    """How tensor parallelism splits the layers of one model."""

    size: int = 1
    """Devices that share a layer."""
    declared_by: str = ""
    """Whose plan it is: a family's name, or what else."""
    specs: Mapping[str, ParameterSpec] = field(default_factory=dict)
    """First name of each parameter that the plan says something of -> the axis of each dimension."""
    unsplit: Mapping[str, str] = field(default_factory=dict)
    """First name of each parameter that would be split, and is not -> why."""
    styles: Mapping[str, str] = field(default_factory=dict)
    """First name of each parameter whose layer computes otherwise on a part of the heads or of the width -> how, in
    transformers' words. A partitioner of programs finds that out by itself; an engine that runs a process for each
    device goes by it. A plan of the user's own says nothing of it."""
    num_key_value_heads: int = 0
    """Of a layer, where the model's config says that."""
    sequence_parallel: bool = False
    """Whether the activations between units are split along their length, too."""

    def spec_of(self, name: str) -> ParameterSpec:
        """Return the spec of a parameter by its first name; empty where the plan says nothing of it."""
        return self.specs.get(name, ())

    @property
    def listed_unsplit(self) -> str:
        """What each device has in full, and why, in one line."""
        return "; ".join(map(str.strip, _listed(self.unsplit)))

    def __str__(self) -> str:
        activations = ", activations between units along their length" if self.sequence_parallel else ""
        lines = [f"  layers split over tp {self.size} by the plan of {self.declared_by}{activations}"]
        lines += _listed(
            {
                name: f"({', '.join(' '.join(axes_in(entry)) or '-' for entry in spec)})"
                for name, spec in self.specs.items()
            }
        )
        lines += _listed({name: f"not split: {reason}" for name, reason in self.unsplit.items()})
        return "\n".join(lines)


OWN_PLAN = "config.dist.tp.plan"
"""Who declares a plan that the user has written."""

Shapes = Mapping[tuple[str, ...], tuple[int, ...]]
"""All names of each parameter, the first one first -> its shape."""


def plan_tensor_parallel(
    model: nn.Module,
    config: "TPConfig",
    mesh: Mesh,
    shapes: Shapes,
    experts: Mapping[str, ParameterSpec],
) -> TensorParallelPlan:
    """Decide how a model's layers are split.

    Args:
        model: The model; it is only read.
        config: `config.dist.tp`.
        mesh: The mesh.
        shapes: The model's parameters, without those of experts that are spread over devices.
        experts: How these are split.

    Raises:
        ConfigError: The plan does not fit the model, the model's sizes do not divide, or no plan is known for it.
    """
    size = mesh.size(Role.TENSOR)
    if config.plan is not None:
        specs = _by_own_plan(config.plan, mesh, shapes)
        return TensorParallelPlan(size, OWN_PLAN, specs, sequence_parallel=config.sequence_parallel)
    if size == 1:
        return TensorParallelPlan()
    described = find_config(model)
    family = getattr(described, "model_type", "")
    rules = FAMILIES.get(family) or _declared_rules(model, described)
    specs, unsplit, styles = _by_rules(rules, size, described, shapes)
    if not any(_TP in spec for spec in specs.values()):
        raise ConfigError(_no_plan(model, size, shapes))
    declared_by = family or type(model).__name__
    specs |= experts
    num_key_value_heads = getattr(described, _KV_HEADS, None) or 0
    return TensorParallelPlan(size, declared_by, specs, unsplit, styles, num_key_value_heads, config.sequence_parallel)


_ADAPTER = re.compile(r"\.lora_(A|B)\.[^.]+\.weight$")
"""The two weights of peft's LoRA: the first is multiplied with the input of the layer beside it, the second adds to its
output."""
BASE_LAYER = ".base_layer"
"""That layer, in the module that has both."""
_SPLIT_ADAPTERS: Mapping[tuple[str, str], tuple[ParameterSpec, str]] = {
    ("A", "rowwise"): (_BY_INPUT, "rowwise"),
    ("B", "colwise"): (_BY_OUTPUT, "colwise"),
    ("B", "packed_colwise"): (_BY_OUTPUT, "packed_colwise"),
    ("B", SHARED_HEADS): ((), SHARED_HEADS),
}
"""Which of the two, and how the layer beside it computes with its part -> how the adapter is split, and computes."""
STYLES_WITH_ADAPTERS = ("", _GATHERED, "rowwise_split_input", *(style for _, style in _SPLIT_ADAPTERS))
"""How layers beside adapters compute. From the first three the adapter, which is not split, takes and gives all."""


def _split_adapters(names: Iterable[str], specs: dict[str, ParameterSpec], styles: dict[str, str]) -> None:
    """Add how weights of adapters are split, so that they take and give what the layers beside them do.

    Args:
        names: First names of all parameters.
        specs: By the rules.
        styles: By the rules.
    """
    for name in names:
        found = _ADAPTER.search(name)
        style = styles.get(f"{name[: found.start()]}{BASE_LAYER}.weight", "") if found else ""
        split = _SPLIT_ADAPTERS.get((found[1], style)) if found else None
        if split is not None:
            styles[name] = split[1]
            specs |= {name: split[0]} if split[0] else {}


def _by_rules(
    rules: Sequence[Rule], size: int, described: Any, shapes: Shapes
) -> tuple[dict[str, ParameterSpec], dict[str, str], dict[str, str]]:
    """Return the specs of what the rules split, why the rest of what they fit is not split, and the styles."""
    specs: dict[str, ParameterSpec] = {}
    unsplit: dict[str, str] = {}
    styles: dict[str, str] = {}
    for names, shape in shapes.items():
        of_layers = [name.replace(BASE_LAYER, "") for name in names]
        rule = next((rule for rule in rules if any(re.search(rule.pattern, name) for name in of_layers)), None)
        own = rule.spec if rule is not None else ()
        own = own[:1] if len(shape) == 1 and own[:1] == (_TP,) else own  # the rule of a weight, and a vector
        if rule is None or len(own) > len(shape):
            continue
        if not own:
            styles[names[0]] = rule.style
            continue
        spec = (*[None] * (len(shape) - len(own)), *own)
        obstacle = _obstacle(rule, spec, shape, size, described)
        if obstacle is None:
            specs[names[0]] = spec
            styles[names[0]] = rule.style or ("rowwise" if rule.spec == _BY_INPUT else "colwise")
        elif rule.may_stay_unsplit:
            unsplit[names[0]] = obstacle
            num_heads = getattr(described, _KV_HEADS, None)
            if rule.count == _KV_HEADS and num_heads and size % num_heads == 0:
                styles[names[0]] = SHARED_HEADS
        else:
            raise ConfigError(
                f"config.dist.tp.size = {size} cannot split {names[0]!r} of shape {shape}: {obstacle}. Choose a size "
                "that divides, and put the other devices on config.dist.fsdp.size; or write a plan of your own into "
                "config.dist.tp.plan"
            )
    _split_adapters([first for first, *_ in shapes], specs, styles)
    return specs, unsplit, styles


def _obstacle(rule: Rule, spec: ParameterSpec, shape: tuple[int, ...], size: int, described: Any) -> str | None:
    count = getattr(described, rule.count, None) if rule.count else None
    if count is not None and count % size:
        return f"{rule.count} = {count} is not a multiple of {size}"
    length = shape[spec.index(_TP)]
    return f"{length} is not a multiple of {size}" if length % size else None


def _by_own_plan(plan: Mapping[str, Sequence[str | None]], mesh: Mesh, shapes: Shapes) -> dict[str, ParameterSpec]:
    specs: dict[str, ParameterSpec] = {}
    unused = dict(plan)
    for names, shape in shapes.items():
        fitting = [pattern for pattern in plan if any(re.search(pattern, name) for name in names)]
        for pattern in fitting:
            unused.pop(pattern, None)
        if fitting:
            specs[names[0]] = _checked_spec(fitting[0], tuple(plan[fitting[0]]), names[0], shape, mesh)
    for pattern in unused:
        raise ConfigError(
            f"config.dist.tp.plan has the pattern {pattern!r}, which is found in no parameter's name; "
            f"{_candidates(shapes)}"
        )
    return specs


def _checked_spec(pattern: str, spec: ParameterSpec, name: str, shape: tuple[int, ...], mesh: Mesh) -> ParameterSpec:
    given = f"config.dist.tp.plan[{pattern!r}] = {list(spec)}"
    if len(spec) != len(shape):
        raise ConfigError(
            f"{given} has {len(spec)} entries, and fits {name!r} of shape {shape}: write one for each dimension, None "
            r"where it is not split, and let the pattern tell weights from biases, such as '\.weight$'"
        )
    for entry, length in zip(spec, shape, strict=True):
        for axis in (axis for axis in axes_in(entry) if length % mesh.axis_size(axis)):
            raise ConfigError(
                f"{given} splits {name!r} of shape {shape}, and {length} is not a multiple of {axis}'s "
                f"{mesh.axis_size(axis)} devices: write None there, or another size"
            )
    return spec


def find_config(model: nn.Module) -> Any:
    """Return the config of the transformers model that this is, or that lies in it; None where there is none."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return next((config for config in configs if getattr(config, "model_type", None)), None)


def _declared_rules(model: nn.Module, described: Any) -> list[Rule]:
    """Translate the plan that a transformers model declares for its own tensor parallelism."""
    declared = dict(getattr(described, "base_model_tp_plan", None) or {})
    for module in model.modules():
        declared |= getattr(type(module), "_tp_plan", None) or {}
    rules: list[Rule] = []
    style: str
    norms: list[Rule] = []
    for path, style in declared.items():
        spec = _DECLARED.get(style)
        if spec is None:
            continue
        place = r"(^|\.)" + re.escape(path).replace(r"\*", r"\d+")
        by_heads = "att" in path and style in ("colwise", "rowwise")  # others put heads together
        count = "" if not by_heads else _KV_HEADS if re.search(r"\b[kv]_proj$", path) else _HEADS
        may_stay_unsplit = count == _KV_HEADS or not by_heads and style not in _SHARED_WIDTH
        of_experts = declared.get(path.rpartition(".")[0]) == _EXPERTS
        word = _EXPERTS if of_experts else _RENAMED.get(style, style)
        rules.append(Rule(rf"{place}(\.weight)?$", spec, count, may_stay_unsplit, word))
        if spec == _BY_OUTPUT:
            rules.append(Rule(rf"{place}\.bias$", (_TP,), count, may_stay_unsplit, word))
        if style == "colwise" and re.search(r"\b[qk]_proj$", path):  # norms of each head, which plans may leave out
            norm = place.removesuffix("_proj") + r"_(layer)?norm\.(weight|bias)$"
            norms.append(Rule(norm, (), style=SUMMED_GRADIENT))
    return rules + norms


_SHARED_WIDTH = ("colwise", "rowwise", "packed_colwise", "packed_rowwise")
"""Styles of layers that follow one another: both are split, or neither."""
_RENAMED = {"colwise_rep": _GATHERED, "rowwise_rep": "rowwise_split_input"}
"""Older words for the same."""


def _no_plan(model: nn.Module, size: int, shapes: Shapes) -> str:
    return (
        f"config.dist.tp.size = {size}, and it is not known how the layers of {type(model).__name__} are to be split: "
        f"it is of none of the families {', '.join(FAMILIES)}, and declares no plan. Write one into "
        "config.dist.tp.plan, an ordered mapping of patterns, searched for in parameters' names, to one axis for each "
        r"dimension, such as {r'\.up\.weight$': ['tp', None], r'\.down\.weight$': [None, 'tp']}; " + _candidates(shapes)
    )


def _candidates(shapes: Shapes) -> str:
    names = list(dict.fromkeys(_pattern(name) for name, *_ in shapes))
    return f"its parameters are {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"


def _pattern(name: str) -> str:
    """Return a parameter's name with a * for each number: what repeated layers have in common."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _listed(entries: Mapping[str, str]) -> Iterable[str]:
    """Return a line for each of a mapping's entries, with those of repeated layers joined."""
    counts = Counter((_pattern(name), text) for name, text in entries.items())
    return [f"    {name}{f' ({count})' if count > 1 else ''}  {text}" for (name, text), count in counts.items()]
