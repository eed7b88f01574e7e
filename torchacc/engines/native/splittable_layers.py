"""What the native engine splits over the axis `tp`, and refuses because a part would compute something else."""

import re

from torch import nn

from torchacc.engines.native.verified_plans import VERIFIED_PLANS, fingerprint
from torchacc.errors import ConfigError
from torchacc.parallel.axes import Role, restricted_to
from torchacc.parallel.plan import ShardingPlan
from torchacc.parallel.tensor_parallel import (
    BASE_LAYER,
    FAMILIES,
    OWN_PLAN,
    SHARED_HEADS,
    STYLES_WITH_ADAPTERS,
    SUMMED_GRADIENT,
    TensorParallelPlan,
    find_config,
)

_KEYS_OR_VALUES = re.compile(r"\.[kv]_proj\.")
_ADAPTED_LINEAR = "peft.tuners.lora.layer.Linear"
_AROUND_ADAPTERS = ("peft.peft_model.", "peft.tuners.lora.model.")
"""What holds a model whose layers have adapters."""
_NORM_OF_HEADS = re.compile(r"(\.[qk])_(?:layer)?norm\.\w+$")


def check(model: nn.Module, plan: ShardingPlan) -> None:
    """Refuse models and plans that would not compute the unsharded numbers.

    Args:
        model: The model; it is only read.
        plan: Its plan.

    Raises:
        ConfigError: The plan is not that of a family that is known to compute right, or asks for more.
    """
    tp, instead = plan.tensor_parallel, "use config.backend = 'xla' with config.dist.fsdp.use_spmd = True"
    _check_family(model, tp, instead)
    if tp.declared_by != OWN_PLAN:
        _check_options(model, plan, instead)
    _check_modules(model, tp, instead)
    _check_adapters(model, tp)
    if tp.sequence_parallel:
        raise ConfigError(f"config.dist.tp.sequence_parallel = True is not available in the native engine: {instead}")
    is_ours = tp.declared_by in FAMILIES
    for name, reason in tp.unsplit.items():
        shares_heads = tp.styles.get(name) == SHARED_HEADS and is_ours
        if _KEYS_OR_VALUES.search(name) and not shares_heads:
            raise ConfigError(
                f"config.dist.tp.size = {tp.size}, and {reason}: the native engine splits keys and values as "
                f"queries. Choose a size that divides it{', or a multiple of it' if is_ours else ''}, or {instead}"
            )


def _check_modules(model: nn.Module, tp: TensorParallelPlan, instead: str) -> None:
    """Refuse modules and parameters that no plan can split right."""
    number = next((name for name, parameter in model.named_parameters() if not parameter.dim()), None)
    if number is not None:
        raise ConfigError(
            f"config.dist.tp.size = {tp.size}, and the parameter {number!r} has no dimension, which the native "
            f"engine keeps on every device only where layers are not split: give it the shape (1,), or {instead}"
        )
    counting = (name for name, module in model.named_modules() if getattr(module, "scale_grad_by_freq", False))
    if (name := next((name for name in counting if f"{name}.weight" in tp.specs), None)) is not None:
        raise ConfigError(
            f"config.dist.tp.size = {tp.size}, and scale_grad_by_freq=True lets {name!r} count tokens by rows, also "
            f"those that another device looks up: write scale_grad_by_freq=False, or {instead}"
        )


def _check_adapters(model: nn.Module, tp: TensorParallelPlan) -> None:
    """Refuse adapters of peft but those of LoRA beside linear layers, which are split as these are."""
    for name, module in model.named_modules():
        kind = f"{type(module).__module__}.{type(module).__name__}"
        if not kind.startswith("peft.") or kind.startswith(_AROUND_ADAPTERS):
            continue
        style = tp.styles.get(f"{name}{BASE_LAYER}.weight", "")
        if kind != _ADAPTED_LINEAR or style not in STYLES_WITH_ADAPTERS or tp.declared_by == OWN_PLAN:
            raise ConfigError(
                f"config.dist.tp.size = {tp.size}, and {name!r} is a {kind}: of peft's adapters the native engine "
                "splits those of LoRA, without use_dora, in linear layers of the families that it knows. Leave this "
                "one out of target_modules and modules_to_save, put these devices on config.dist.fsdp.size, or split "
                "the merged model, model.merge_and_unload()"
            )


def _check_family(model: nn.Module, tp: TensorParallelPlan, instead: str) -> None:
    if tp.declared_by in FAMILIES:
        return
    if tp.declared_by == OWN_PLAN:
        _check_own_plan(model, tp, instead)
        return
    given = f"config.dist.tp.size = {tp.size} by the plan that {tp.declared_by} declares"
    if tp.declared_by not in VERIFIED_PLANS:
        raise ConfigError(
            f"{given}: the native engine splits families for which it was shown that a process computes right with its "
            f"part of the heads, {', '.join(sorted({*FAMILIES, *VERIFIED_PLANS}))}. Write a plan of your own into "
            f"config.dist.tp.plan, which is right for every model and sends more, or {instead}"
        )
    if VERIFIED_PLANS[tp.declared_by] != fingerprint(find_config(model)):
        raise ConfigError(
            f"{given}: it is another one in this version of transformers than that which was shown to compute right. "
            f"Write a plan of your own into config.dist.tp.plan, or {instead}"
        )


def _check_options(model: nn.Module, plan: ShardingPlan, instead: str) -> None:
    """Refuse what a model's config, or a subclass, adds to a family so that a part computes something else."""
    tp = plan.tensor_parallel
    otherwise = f"Write a plan of your own into config.dist.tp.plan, which is right for every model, or {instead}"
    if any(getattr(find_config(model), "activation_sparsity_pattern", None) or ()):
        raise ConfigError(
            f"config.dist.tp.size = {tp.size}, and activation_sparsity_pattern lets an MLP of {tp.declared_by} keep "
            f"what is large among all of its columns, of which a device has a part. {otherwise}"
        )
    for planned in plan.parameters:
        projection = _NORM_OF_HEADS.sub(r"\1_proj.weight", planned.name)
        if projection == planned.name or tp.styles.get(projection) not in ("colwise", SHARED_HEADS):
            continue
        if tp.styles.get(planned.name) != SUMMED_GRADIENT or len(planned.shape) != 1:
            raise ConfigError(
                f"config.dist.tp.size = {tp.size}, and {planned.name!r} of shape {planned.shape} norms heads, of which "
                f"a device has a part, in a way that the plan of {tp.declared_by} does not know. {otherwise}"
            )


def _check_own_plan(model: nn.Module, tp: TensorParallelPlan, instead: str) -> None:
    changing = next((type(module).__name__ for module in model.modules() if getattr(module, "inplace", False)), None)
    if changing is not None:
        raise ConfigError(
            f"config.dist.tp.plan in the native engine, and {changing}(inplace=True) changes what it is given, "
            f"which may be the output of a split layer: write inplace=False, or {instead}"
        )
    for name, spec in tp.specs.items():
        if spec != restricted_to(spec, Role.TENSOR):
            raise ConfigError(
                f"config.dist.tp.plan gives {list(spec)} for {name!r}: natively each device's part is sharded over "
                f"fsdp by its rows. Write None there, or {instead}"
            )
