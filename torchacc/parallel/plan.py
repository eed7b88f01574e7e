"""Decide how a model is sharded, as plain data: no device, no process group, nothing is changed.

A `ShardingPlan` names the units (modules whose parameters are gathered and freed together), which parameter belongs to
which unit, what is tied and what is frozen, and the dtypes. Engines carry it out.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import UninitializedParameter

from torchacc.chunked_loss.model_loss import find_head
from torchacc.errors import ConfigError
from torchacc.parallel.axes import Role
from torchacc.parallel.experts import Experts, select_experts, split_specs
from torchacc.parallel.float8_layers import Float8Layers, select_float8
from torchacc.parallel.layer_scan import select_scanned
from torchacc.parallel.mesh import STRATEGIES, Mesh
from torchacc.parallel.pipeline_plan import PipelinePlan, plan_pipeline
from torchacc.parallel.tensor_parallel import TensorParallelPlan, plan_tensor_parallel
from torchacc.parallel.units import has_forward, select_recomputed, select_units

if TYPE_CHECKING:
    from torchacc.config import Config

ParameterOwner = tuple[nn.Module, str]
"""A module, and the name under which it keeps a parameter."""


@dataclass(frozen=True)
class PlannedParameter:
    """One parameter of the model."""

    name: str
    """Its first name, in the order of `named_parameters()`."""
    aliases: tuple[str, ...]
    """Its other names: what is tied to it."""
    shape: tuple[int, ...]
    trainable: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the parameter, the first one first."""
        return (self.name, *self.aliases)

    def owners(self, model: nn.Module) -> list[ParameterOwner]:
        """Return all places where a model keeps it: the modules, each with the name that the parameter has there."""
        paths = [name.rpartition(".") for name in self.names]
        return [(model.get_submodule(path), leaf) for path, _, leaf in paths]


@dataclass(frozen=True)
class Unit:
    """A module that is sharded together."""

    name: str
    """The module's name; empty for the model itself."""
    module_class: str
    parameters: tuple[PlannedParameter, ...]
    """The parameters that lie in this unit under all of their names, and in no smaller one."""

    @property
    def numel(self) -> int:
        """Number of elements of its own parameters."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class ShardingPlan:
    """How one model is sharded."""

    units: tuple[Unit, ...]
    """The units in the order of the model's modules; the last one is the model itself."""
    mesh: Mesh
    compute_dtype: str
    """Dtype of matrix products: `float32`, `bfloat16` or `float16`."""
    master_dtype: str
    """Dtype of the parameters that the optimizer steps: `float32` or `bfloat16`."""
    reduce_dtype: str
    """Dtype in which gradients are summed over the devices: `float32` or `bfloat16`."""
    reshard_after_forward: bool
    """Whether units free their weights after their forward, and gather them again for their backward."""
    flatten: bool
    """Whether each unit's parameters become one flat parameter."""
    recomputed: tuple[str, ...]
    """Names of the modules whose activations are recomputed in backward, none of them inside of another."""
    shards_on_host: bool
    """Whether shards of parameters, gradients and optimizer state lie in the host's memory."""
    activations_on_host: bool
    """Whether what forward saves for backward waits in the host's memory."""
    forward_prefetch: bool
    """Whether each unit's forward begins with the gather of the next unit."""
    backward_prefetch: bool
    """Whether each unit's backward begins with the gather of the unit that comes after it in backward."""
    tensor_parallel: TensorParallelPlan = field(default_factory=TensorParallelPlan)
    """How tensor parallelism splits the layers."""
    recompute_policy: str = "full"
    """What of these modules is recomputed: `full`, or all but what `save_matmuls` keeps."""
    steps_in_backward: bool = False
    """Whether each weight steps as soon as backward has its gradient, which is then freed."""
    scanned: tuple[str, ...] = ()
    """Names of the lists of layers that run as one loop each."""
    float8: Float8Layers | None = None
    """The linear layers that compute in float8."""
    experts: tuple[Experts, ...] = ()
    """The units whose experts are spread over devices: no device gathers those that others compute."""
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    """How the layers are split into stages."""
    ring_size: int | None = None
    """How many of the devices that share a sample pass keys and values on in a ring; None for as few as can be."""
    left_to_model: tuple[str, ...] = ()
    """Modules around the head that are no units, as the loss in chunks computes with it after their forward."""

    def of_stages(self, stages: Collection[int]) -> "ShardingPlan":
        """Return the plan of what some stages compute: their units and parameters, and what they compute again."""
        units = []
        for unit in self.units:
            own = tuple(each for each in unit.parameters if set(stages) & set(self.pipeline.stages_of(each.names)))
            if own or not unit.name:
                units.append(replace(unit, parameters=own))
        recomputed = tuple(name for name in self.recomputed if self.pipeline.stage_of(name) in stages)
        experts = tuple(each for each in self.experts if self.pipeline.stage_of(each.module) in stages)
        return replace(self, units=tuple(units), recomputed=recomputed, experts=experts)

    @property
    def saves_matmuls(self) -> bool:
        """Whether modules that are recomputed keep the results of matrix products, convolutions and attention."""
        return self.recompute_policy == "save_matmuls"

    @property
    def is_replicated(self) -> bool:
        """Whether each device computes with all parameters as they are: none is gathered, cast or moved."""
        is_cast = {self.compute_dtype, self.master_dtype, self.reduce_dtype} != {"float32"}
        is_replicated = self.mesh.num_devices == self.mesh.size(Role.REPLICATE)
        return is_replicated and not is_cast and not self.shards_on_host

    def is_resharded_after_forward(self, unit: Unit) -> bool:
        """Return whether a unit is resharded after its forward. The root is not: backward starts there."""
        return self.reshard_after_forward and bool(unit.name)

    @property
    def prefetched_in_forward(self) -> dict[str, str]:
        """For each unit, by name, the one that is gathered when its forward begins: the model runs first, then each."""
        if not self.forward_prefetch:
            return {}
        order = [unit.name for unit in (self.units[-1], *self.units[:-1]) if unit.parameters]
        return dict(zip(order, order[1:], strict=False))

    @property
    def parameters(self) -> Iterator[PlannedParameter]:
        """All parameters, each once."""
        return (parameter for unit in self.units for parameter in unit.parameters)

    @property
    def numel(self) -> int:
        """Number of elements of the model, tied parameters counted once."""
        return sum(unit.numel for unit in self.units)

    @property
    def num_trained(self) -> int:
        """Number of elements that are trained, of those."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trainable)

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are one parameter."""
        return tuple(parameter.names for parameter in self.parameters if parameter.aliases)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that are not trained."""
        return tuple(parameter.name for parameter in self.parameters if not parameter.trainable)

    def __str__(self) -> str:
        lines = [f"{self.mesh.describe()}, compute in {self.compute_dtype}, {self.numel:,} parameters"]
        if {self.compute_dtype, self.reduce_dtype} != {"float32"}:
            lines += [f"  masters in {self.master_dtype}, gradients summed in {self.reduce_dtype}"]
        lines += ["  nothing is sharded or cast: parameters stay as they are"] if self.is_replicated else []
        lines += ["  shards on the host"] if self.shards_on_host else []
        lines += ["  activations on the host"] if self.activations_on_host else []
        lines += ["  weights step in backward"] if self.steps_in_backward else []
        lines += ["  gathers ahead in forward"] if self.forward_prefetch else []
        lines += ["  gathers nothing ahead in backward"] if not self.backward_prefetch else []
        width = max(len(unit.name or "(model)") for unit in self.units)
        lines += [f"  {unit.name or '(model)':<{width}}  {unit.module_class}  {unit.numel:,}" for unit in self.units]
        left = ", ".join(self.left_to_model)
        lines += [f"  no units, as compute.chunked_loss computes with the head: {left}"] if left else []
        lines += [str(self.float8)] if self.float8 is not None else []
        lines += [f"  tied: {' = '.join(names)}" for names in self.tied]
        lines += [f"  frozen: {len(self.frozen)} parameters"] if self.frozen else []
        lines += [str(self.tensor_parallel)] if self.tensor_parallel.size > 1 else []
        lines += [str(self.pipeline)] if self.pipeline.size > 1 else []
        but = " but for matrix products" if self.saves_matmuls else ""
        lines += [f"  recomputed in backward{but}: {', '.join(self.recomputed)}"] if self.recomputed else []
        lines += [f"  run as a loop: {', '.join(self.scanned)}"] if self.scanned else []
        lines += [str(experts) for experts in self.experts]
        return "\n".join(lines)


def make_plan(model: nn.Module, config: "Config", mesh: Mesh) -> ShardingPlan:
    """Derive the plan for a model.

    Args:
        model: The user's model; it is only read.
        config: A resolved config.
        mesh: The mesh that the job has.

    Raises:
        ConfigError: The model cannot be sharded as asked: it has no `forward`, no parameters, or no module of a class
            that `wrap_layer_cls` or `gc_cls` names.
    """
    _check_model(model)
    modules = dict(model.named_modules())
    chosen = select_units(model, config.dist.fsdp)
    head = find_head(model) if config.compute.chunked_loss else None
    left_to_model = [name for name in chosen if head is not None and f"{head}.".startswith(f"{name}.")]
    chosen = [name for name in chosen if name not in left_to_model]
    experts = select_experts(model, mesh)
    unit_names = {*chosen, *(each.module for each in experts)}
    owned: dict[str, list[PlannedParameter]] = {name: [] for name in modules if name in unit_names or not name}
    parameters = list(_parameters(model))
    for parameter in parameters:
        owned[_owner(parameter.names, unit_names)].append(parameter)
    root = owned.pop("")
    if config.dist.tp.sequence_parallel and not owned:
        raise ConfigError(
            f"config.dist.tp.sequence_parallel = True splits the activations between units, and {type(model).__name__} "
            "has no layers that become units by themselves: name them in config.dist.fsdp.wrap_layer_cls"
        )
    recomputed = select_recomputed(model, config.memory, chosen)
    if head is not None:
        _refuse_recomputed_head(recomputed, head)
    units = [Unit(name, type(modules[name]).__name__, tuple(parameters)) for name, parameters in owned.items()]
    spread = {parameter.name: parameter.shape for each in experts for parameter in owned[each.module]}
    others = {parameter.names: parameter.shape for parameter in parameters if parameter.name not in spread}
    return ShardingPlan(
        units=(*units, Unit("", type(model).__name__, tuple(root))),
        mesh=mesh,
        compute_dtype="bfloat16" if config.compute.bf16 else "float16" if config.compute.fp16 else "float32",
        master_dtype=config.compute.master_dtype,
        reduce_dtype=config.compute.reduce_dtype,
        reshard_after_forward=STRATEGIES[config.dist.fsdp.sharding_strategy].reshard_after_forward,
        flatten=config.dist.fsdp.flatten_parameters,
        shards_on_host=config.dist.fsdp.cpu_offload,
        activations_on_host=config.memory.offload_activations,
        forward_prefetch=config.dist.fsdp.forward_prefetch,
        backward_prefetch=config.dist.fsdp.backward_prefetch != "NONE",
        tensor_parallel=plan_tensor_parallel(model, config.dist.tp, mesh, others, split_specs(spread)),
        recomputed=recomputed,
        recompute_policy=config.memory.gc_policy,
        steps_in_backward=config.memory.step_in_backward,
        scanned=select_scanned(model, chosen, recomputed=recomputed) if config.compute.scan_layers else (),
        float8=select_float8(model, config) if config.compute.fp8 else None,
        experts=experts,
        pipeline=plan_pipeline(model, config.dist.pp, mesh, [(p.names, p.numel) for p in parameters]),
        ring_size=config.dist.sp.ring_size,
        left_to_model=tuple(left_to_model),
    )


def _refuse_recomputed_head(recomputed: Sequence[str], head: str) -> None:
    for name in recomputed:
        if f"{head}.".startswith(f"{name}."):
            raise ConfigError(
                f"memory.gc recomputes {name!r} in backward, and with compute.chunked_loss the logits of {head!r} "
                "are gone by then: name the classes of other modules in config.memory.gc_cls, as those of the layers"
            )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"accelerate() takes a torch.nn.Module, and got {type(model).__name__}")
    if not has_forward(model):
        raise ConfigError(
            f"{type(model).__name__} has no forward() of its own, so that there is nothing to run: "
            "pass the module that computes the loss or the outputs, not a container of its parts"
        )
    parameters = list(model.named_parameters())
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    lazy = [name for name, parameter in parameters if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise ConfigError(f"{lazy[0]!r} has no shape yet: run the lazy model once on a sample before accelerate()")
    hooked = [name for name, p in parameters if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    if hooked:
        raise ConfigError(
            f"the parameter {hooked[0]!r} has a hook, which would be lost when the parameter is replaced by its shard: "
            "register hooks after accelerate()"
        )


def _parameters(model: nn.Module) -> Iterator[PlannedParameter]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, (first, *aliases) in names.items():
        yield PlannedParameter(first, tuple(aliases), tuple(parameter.shape), parameter.requires_grad)


def _owner(names: Sequence[str], unit_names: set[str]) -> str:
    """Return the innermost unit that holds a parameter under all of its names."""
    candidates = [unit for unit in unit_names if all(name.startswith(f"{unit}.") for name in names)]
    return max(candidates, key=len, default="")
