"""Split a model of transformers into the stages of a pipeline: its own forward runs on each, with its own layers only.

The modules of other stages stay in the model, under their names, and pass on what they are given. Their parameters have
no elements, so that an optimizer or a checkpoint meets the same names on every process.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from torchacc.config import Config
from torchacc.engines.deferred import forget_values
from torchacc.engines.initial_values import kept_dtype
from torchacc.engines.native import script_reads
from torchacc.engines.option_conflicts import refuse_beside
from torchacc.engines.patches import transformers_attention
from torchacc.errors import ConfigError, EngineError
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.pipeline_plan import PipelinePlan
from torchacc.parallel.plan import PlannedParameter, ShardingPlan, make_plan

_ADAPTERS = "peft.tuners.lora."
"""The package of adapters that layers may have."""
_MODULES = (transformers_attention.LIBRARY, "torch.nn.", _ADAPTERS)
"""Packages of which all modules have to be."""


def check(config: Config, mesh: Mesh, model: nn.Module) -> None:
    """Refuse what would not compute the unsharded numbers, or was not shown to.

    Args:
        config: A resolved config.
        mesh: Its mesh.
        model: The model; it is only read.

    Raises:
        ConfigError: It would not.
    """
    asked = f"config.dist.pp.size = {mesh.size(Role.PIPELINE)}"
    compute, memory, dist = config.compute, config.memory, config.dist
    refused = {
        "config.dist.tp.plan": dist.tp.plan is not None,
        "config.dist.fsdp.cpu_offload = True": dist.fsdp.cpu_offload,
        "config.compute.fp16 = True": compute.fp16,
        "config.memory.offload_activations = True": memory.offload_activations,
    }
    refuse_beside(asked, refused)
    if dist.pp.schedule == "zero_bubble":  # a graph computes the gradients of weights with the others
        refuse_beside("config.dist.pp.schedule = 'zero_bubble'", {"config.compute.compile = True": compute.compile})
    if type(model) is nn.Module:  # the trainer asks before it has a model
        return
    why = _why_adapters_cannot(model) or _why_it_cannot(language_model(model))
    if why is not None:
        raise ConfigError(f"{asked} with {type(model).__name__}: {why}. Use config.dist.fsdp.size")
    _check_plan(asked, model, make_plan(model, config, mesh))


def language_model(model: nn.Module) -> Any:
    """Return the model of transformers that computes: the model itself, or that to which peft has given adapters."""
    has_adapters = type(model).__module__.startswith("peft.")
    return next(iter(transformers_attention.models_of(model)), model) if has_adapters else model


def _why_adapters_cannot(model: Any) -> str | None:
    """Return why a model with adapters of peft cannot be split into stages; None where it can, or has none."""
    if not type(model).__module__.startswith("peft."):
        return None
    configs = getattr(model, "peft_config", {}).values()
    kinds = {str(getattr(each.peft_type, "value", each.peft_type)) for each in configs}
    if kinds != {"LORA"}:
        return (
            f"adapters of peft that are split into stages are those of LoRA, and these are {', '.join(sorted(kinds))}"
        )
    copied = sorted({name for each in configs for name in each.modules_to_save or ()})
    if copied:
        return f"of modules_to_save = {copied} peft holds two copies, which are not split into stages: leave it out"
    return None


def _why_it_cannot(model: Any) -> str | None:
    """Return why a model cannot be split into stages; None where it can."""
    if model not in transformers_attention.models_of(model):
        return "it is not a model of transformers, of which it is known what runs before and after the layers"
    config, forward = model.config, inspect.unwrap(type(model).forward)
    if config.model_type not in transformers_attention.SPLIT_FAMILIES:
        known = ", ".join(transformers_attention.SPLIT_FAMILIES)
        return f"the families that are split into stages are {known}, and this is {config.model_type!r}"
    if not type(model).__name__.endswith(transformers_attention.PREDICTS_NEXT_TOKENS):
        return "it does not predict each next token by transformers' own head"
    if not forward.__module__.startswith(transformers_attention.LIBRARY) or "forward" in vars(model):
        return f"its forward is the script's own ({forward.__module__})"
    if not transformers_attention.has_loss_of_next_tokens(model):
        return "its loss_function is not transformers' loss of causal language models"
    if getattr(config, "output_router_logits", False):
        return (
            "its loss balances experts (output_router_logits) over the routers of all layers and the tokens of all "
            "microbatches, and each stage sees its own alone"
        )
    if getattr(config, "add_cross_attention", False):
        return "its layers look at another model's tokens, too"
    for name, module in model.named_modules():
        if not type(module).__module__.startswith(_MODULES):
            return f"{name!r} is a {type(module).__name__} of {type(module).__module__}, which is not known"
    return None


def _check_plan(asked: str, model: nn.Module, plan: ShardingPlan) -> None:
    holding_layers = f"{plan.pipeline.layers}."
    for name, module in model.named_modules():
        is_adapter = type(module).__module__.startswith(_ADAPTERS) and not holding_layers.startswith(f"{name}.")
        if is_adapter and not plan.pipeline.is_layer(name):
            raise ConfigError(
                f"{asked}, and {name!r} has an adapter of peft, and is not a part of a layer: leave it out of the "
                "adapters' target_modules, or use config.dist.fsdp.size"
            )
    around = next((name for name in plan.recomputed if not plan.pipeline.is_layer(name)), None)
    if around is not None:
        raise ConfigError(
            f"{asked}, and memory.gc recomputes {around!r} in backward, which is not a layer: name the class of the "
            "layers in config.memory.gc_cls, or leave it out"
        )
    for name, parameter in model.named_parameters():
        if not parameter.dim() or parameter.dtype == torch.float64:
            raise ConfigError(
                f"{asked}, and the parameter {name!r} has the shape {tuple(parameter.shape)} in {parameter.dtype}: "
                "stages hold parameters with dimensions, in float32 or below"
            )


class StageModules:
    """The modules of a model on the device of one stage, or of several: what others compute passes on what it is given.

    Args:
        model: The model, which is changed in place.
        pipeline: How it is split.
        place: The device's place among those of the stages.
        dtype: The dtype in which embeddings would come.
    """

    def __init__(self, model: nn.Module, pipeline: PipelinePlan, place: int, dtype: torch.dtype) -> None:
        self.receive: Callable[[torch.Size], torch.Tensor] | None = None
        """Returns the hidden states of a shape with which the first layer of the stage that runs begins."""
        self.computed: torch.Tensor | None = None
        """Those that its last layer has returned."""
        self._dtype = dtype
        self._layers: Mapping[int, range] = {stage: pipeline.layers_of(stage) for stage in pipeline.stages_at(place)}
        self._running = range(0)
        """The layers of the stage that runs."""
        self._num_layers = pipeline.bounds[-1]
        self._others: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {stage: [] for stage in self._layers}
        """What stands in for modules of other stages while a stage of this device runs, by the module that has them.

        It has no hooks: those of a layer see and change what the layer's own stage computes.
        """
        layers = (f"{pipeline.layers}.{number}" for number in range(self._num_layers))
        for name in (*layers, *pipeline.before, *pipeline.after):
            module, stage = model.get_submodule(name), pipeline.stage_of(name)
            run = self._instead_of(module, name.removeprefix(f"{pipeline.layers}.") if pipeline.is_layer(name) else "")
            if stage not in self._layers:
                _refuse_by_itself(module)
            parent, _, leaf = name.rpartition(".")
            for other in self._layers.keys() - {stage}:
                self._others[other].append((model.get_submodule(parent), leaf, _StandIn(module, run)))

    @property
    def runs_last(self) -> bool:
        """Whether the stage that runs is the last one, whose outputs the model returns."""
        return self._running.stop == self._num_layers

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        """Context manager in which a forward of the model is that of one of this device's stages."""
        self._running = self._layers[stage]
        own = [(parent, leaf, parent.get_submodule(leaf)) for parent, leaf, _ in self._others[stage]]
        for parent, leaf, module in self._others[stage]:
            parent._modules[leaf] = module
        try:
            yield
        finally:
            for parent, leaf, module in own:
                parent._modules[leaf] = module

    def _instead_of(self, module: Any, layer: str) -> Callable[..., torch.Tensor]:
        """Return what runs in the place of a module, which is a layer by its number or none."""
        if layer:
            return partial(self._pass_layer, int(layer))
        return partial(self._embed, module.embedding_dim) if isinstance(module, nn.Embedding) else _pass_on

    def _pass_layer(self, number: int, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Begin with what was received, keep what the stage has computed, or pass it on."""
        if number == self._running.start - 1:
            assert self.receive is not None
            return self.receive(hidden_states.shape)
        if number == self._running.stop:
            self.computed = hidden_states
        return hidden_states

    def _embed(self, width: int, input: torch.Tensor) -> torch.Tensor:
        """Return zeros in the shape of embeddings, in next to no memory."""
        return torch.zeros((), dtype=self._dtype, device=input.device).expand(*input.shape, width)


class _StandIn(nn.Module):
    """Runs a function in the place of a module, of which it has all else."""

    def __init__(self, module: nn.Module, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["stands_for"] = module  # which is not a part of it
        self.forward = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stands_for"], name)


def _refuse_by_itself(module: Any) -> None:
    """Make a module of another stage raise where it is called other than by what stands in for it."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise EngineError(
            f"a part of a model in stages (config.dist.pp.size) was called by itself, and this device has no "
            f"{type(module).__name__} there: call the whole model, on all ranks"
        )

    module.forward = forward


def _pass_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden_states


def leave_out(
    model: nn.Module, parameters: list[PlannedParameter], plan: ShardingPlan, mesh: Any, device: torch.device
) -> list[nn.Parameter]:
    """Replace the parameters of other stages by distributed tensors without elements.

    Args:
        model: The model, which is changed in place.
        parameters: Those parameters.
        plan: The model's plan.
        mesh: The DeviceMesh over which the parameters of this stage are distributed.
        device: This process's.

    Returns:
        The new parameters.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Shard(0) if name == Role.SHARD.value else Replicate() for name in mesh.mesh_dim_names]
    made = []
    for planned in parameters:
        old = model.get_parameter(planned.name)
        forget_values(old)
        empty = torch.empty(0, *planned.shape[1:], dtype=kept_dtype(old.dtype, plan), device=device)
        new = nn.Parameter(DTensor.from_local(empty, mesh, placements, run_check=False), planned.trainable)
        script_reads.note_other_stage(new, planned.shape)
        for owner, leaf in planned.owners(model):
            owner._parameters[leaf] = new
        made.append(new)
    return made
