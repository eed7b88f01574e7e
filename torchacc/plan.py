"""Decide how a model is sharded, as plain data: no device, no process group, nothing is changed.

A `WrapPlan` names the units (modules whose parameters are gathered and freed together), which parameter belongs to
which unit, what is tied and what is frozen, and the dtypes. Engines carry it out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod

from torch import nn
from torch.nn.parameter import UninitializedParameter

from torchacc.config import Config
from torchacc.config.sections import FSDPConfig, MemoryConfig, did_you_mean
from torchacc.errors import ConfigError
from torchacc.scanning import select_scanned
from torchacc.tensor_parallel import LayerSplit, split_layers
from torchacc.topology import STRATEGIES, Topology


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
class WrapPlan:
    """How one model is sharded."""

    units: tuple[Unit, ...]
    """The units in the order of the model's modules; the last one is the model itself."""
    topology: Topology
    compute_dtype: str
    """Dtype of matrix products: `float32`, `bfloat16` or `float16`."""
    master_dtype: str
    """Dtype of the parameters that the optimizer steps: `float32` or `bfloat16`."""
    reduce_dtype: str
    """Dtype in which gradients are summed over the devices: `float32` or `bfloat16`."""
    gathers_again: bool
    """Whether units free their weights after their forward, and gather them again for their backward."""
    flatten: bool
    """Whether each unit's parameters become one flat parameter."""
    recomputed: tuple[str, ...]
    """Names of the modules whose activations are computed again in backward, none of them inside of another."""
    shards_on_host: bool
    """Whether shards of parameters, gradients and optimizer state lie in the host's memory."""
    activations_on_host: bool
    """Whether what forward saves for backward waits in the host's memory."""
    prefetches_forward: bool
    """Whether each unit's forward begins with the gather of the next unit."""
    prefetches_backward: bool
    """Whether each unit's backward begins with the gather of the unit that comes after it in backward."""
    split: LayerSplit = field(default_factory=LayerSplit)
    """How layers are split over the axis `tp`."""
    scanned: tuple[str, ...] = ()
    """Names of the lists of layers that run as one loop each."""

    def gathers_again_in(self, unit: Unit) -> bool:
        """Return whether a unit's weights are freed after its forward: the model's own are where backward starts."""
        return self.gathers_again and bool(unit.name)

    @property
    def gathered_ahead(self) -> dict[str, str]:
        """For each unit, by name, the one that is gathered when its forward begins: the model runs first, then each."""
        if not self.prefetches_forward:
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
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are one parameter."""
        return tuple(parameter.names for parameter in self.parameters if parameter.aliases)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that are not trained."""
        return tuple(parameter.name for parameter in self.parameters if not parameter.trainable)

    def __str__(self) -> str:
        lines = [f"{self.topology.describe()}, compute in {self.compute_dtype}, {self.numel:,} parameters"]
        if {self.compute_dtype, self.reduce_dtype} != {"float32"}:
            lines += [f"  masters in {self.master_dtype}, gradients summed in {self.reduce_dtype}"]
        lines += ["  shards on the host"] if self.shards_on_host else []
        lines += ["  activations on the host"] if self.activations_on_host else []
        lines += ["  gathers ahead in forward"] if self.prefetches_forward else []
        lines += ["  gathers nothing ahead in backward"] if not self.prefetches_backward else []
        width = max(len(unit.name or "(model)") for unit in self.units)
        lines += [f"  {unit.name or '(model)':<{width}}  {unit.module_class}  {unit.numel:,}" for unit in self.units]
        lines += [f"  tied: {' = '.join(names)}" for names in self.tied]
        lines += [f"  frozen: {len(self.frozen)} parameters"] if self.frozen else []
        lines += [str(self.split)] if self.split.size > 1 else []
        lines += [f"  computed again in backward: {', '.join(self.recomputed)}"] if self.recomputed else []
        lines += [f"  run as a loop: {', '.join(self.scanned)}"] if self.scanned else []
        return "\n".join(lines)


def make_plan(model: nn.Module, config: Config, topology: Topology) -> WrapPlan:
    """Derive the plan for a model.

    Args:
        model: The user's model; it is only read.
        config: A resolved config.
        topology: The mesh that the job has.

    Raises:
        ConfigError: The model cannot be sharded as asked: it has no `forward`, no parameters, or no module of a class
            that `wrap_layer_cls` or `gc_cls` names.
    """
    _check_model(model)
    modules = dict(model.named_modules())
    chosen = select_units(model, config.dist.fsdp)
    unit_names = set(chosen)
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
    units = [Unit(name, type(modules[name]).__name__, tuple(parameters)) for name, parameters in owned.items()]
    return WrapPlan(
        units=(*units, Unit("", type(model).__name__, tuple(root))),
        topology=topology,
        compute_dtype="bfloat16" if config.compute.bf16 else "float16" if config.compute.fp16 else "float32",
        master_dtype=config.compute.master_dtype,
        reduce_dtype=config.compute.reduce_dtype,
        gathers_again=STRATEGIES[config.dist.fsdp.sharding_strategy].gathers_again,
        flatten=config.dist.fsdp.flatten_parameters,
        shards_on_host=config.dist.fsdp.cpu_offload,
        activations_on_host=config.memory.offload_activations,
        prefetches_forward=config.dist.fsdp.forward_prefetch,
        prefetches_backward=config.dist.fsdp.backward_prefetch != "NONE",
        split=split_layers(model, config.dist.tp, topology, {p.names: p.shape for p in parameters}),
        recomputed=recomputed,
        scanned=select_scanned(model, chosen, recomputed=recomputed) if config.compute.scan_layers else (),
    )


def select_units(model: nn.Module, config: FSDPConfig) -> list[str]:
    """Choose the modules that become units, the model itself left out.

    By class (`wrap_layer_cls`), by name or callable (`wrap_modules`), by size (`min_num_params`); with none of these
    the classes are inferred from `_no_split_modules`, else from the repeated layers of a `ModuleList`.

    Returns:
        Names of modules, in the model's order.

    Raises:
        ConfigError: A name or pattern fits no module, or fits one that has no `forward` of its own.
    """
    if config.wrap_modules is not None:
        return _by_name(model, config.wrap_modules)
    if config.min_num_params is not None:
        return _by_size(model, config.min_num_params)
    return _by_class(model, config.wrap_layer_cls or infer_layer_classes(model), "dist.fsdp.wrap_layer_cls")


def select_recomputed(model: nn.Module, config: MemoryConfig, units: Sequence[str]) -> tuple[str, ...]:
    """Choose the modules whose activations are computed again in backward.

    These are the modules of the classes `gc_cls`, else the units; of them every `gc_every`-th, and of those the first
    `gc_cnt`. A module inside of another one is left to that one. Without `gc` they are the layers for which
    transformers' own switch, `model.gradient_checkpointing_enable()`, is on.

    Raises:
        ConfigError: `gc_cls` names a class that no module has, or there are no units to choose from.
    """
    if not config.gc:
        own = [name for name, module in model.named_modules() if is_checkpointing_layer(module)]
        return tuple(_outermost(name for name in own if model.get_submodule(name).gradient_checkpointing))
    candidates = _by_class(model, config.gc_cls, "memory.gc_cls") if config.gc_cls else units
    if not candidates:
        raise ConfigError(
            f"memory.gc = True computes the activations of units again, and {type(model).__name__} has no units: name "
            "the classes to compute again in config.memory.gc_cls"
        )
    return tuple(_outermost(candidates)[:: config.gc_every][: config.gc_cnt])


def is_checkpointing_layer(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' layers, which know how to compute themselves again."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def _outermost(names: Iterable[str]) -> list[str]:
    """Leave out the names of modules inside of others; the outer ones come first, as in `named_modules()`."""
    outer: list[str] = []
    for name in names:
        if not any(name.startswith(f"{other}.") for other in outer):
            outer.append(name)
    return outer


def infer_layer_classes(model: nn.Module) -> set[str]:
    """Infer the classes of a model's repeated layers.

    Returns:
        Class names; empty where the model has no repeated layers.
    """
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    present = {type(module).__name__ for name, module in model.named_modules() if name and _has_parameters(module)}
    repeated = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            layers = [layer for layer in _runnable(module) if _has_parameters(layer) and next(layer.children(), 0)]
            classes = [type(layer).__name__ for layer in layers]
            repeated |= {name for name in classes if classes.count(name) > 1}
    return declared & present or repeated


def _runnable(container: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in a container that have a forward; in place of a list inside of the list, its own."""
    for child in container.children():
        if _has_forward(child):
            yield child
        else:
            yield from _runnable(child)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"accelerate() takes a torch.nn.Module, and got {type(model).__name__}")
    if not _has_forward(model):
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
    scalars = [name for name, parameter in parameters if parameter.dim() == 0]
    if scalars:
        raise ConfigError(
            f"the parameter {scalars[0]!r} has no dimension and cannot be sharded: give it the shape (1,), "
            "nn.Parameter(torch.tensor([value]))"
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


def _by_class(model: nn.Module, names: set[str], option: str) -> list[str]:
    candidates = {type(module).__name__ for name, module in model.named_modules() if name}
    for name in sorted(names - candidates):
        hint = did_you_mean(name, candidates) or "none is like it."
        raise ConfigError(
            f"config.{option} names {name!r}, and no module of {type(model).__name__} is of that "
            f"class: {hint} Its classes are {', '.join(sorted(candidates))}"
        )
    return _checked(model, [name for name, module in model.named_modules() if name and type(module).__name__ in names])


def _by_name(model: nn.Module, rule: set[str] | Callable[[str, nn.Module], bool]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    if callable(rule):
        asked = [name for name, module in model.named_modules() if name and rule(name, module)]
        if not asked:
            raise ConfigError(
                "config.dist.fsdp.wrap_modules is a function that chose no module: it is called with the name and the "
                "module of each, and returns True for those that become units"
            )
        return _checked(model, asked)
    for pattern in sorted(rule):
        if not any(_fits(name, pattern) for name in names):
            raise ConfigError(
                f"config.dist.fsdp.wrap_modules has the pattern {pattern!r}, which fits no module of "
                f"{type(model).__name__}: its modules are {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
            )
    chosen = [name for name in names if any(_fits(name, pattern) for pattern in rule)]
    return _checked(model, chosen)


def _fits(name: str, pattern: str) -> bool:
    """Return whether a module's name fits a pattern, of which a * stays at its own depth, unlike fnmatch's."""
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


def _by_size(model: nn.Module, min_num_params: int) -> list[str]:
    """Make a unit of each module, innermost first, that has this many elements not yet in a smaller unit.

    An embedding is left to the unit around it: it is often tied, and seldom worth a gather of its own.
    """
    chosen: set[str] = set()

    def visit(prefix: str, module: nn.Module) -> int:
        left = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        left += sum(visit(f"{prefix}.{name}".lstrip("."), child) for name, child in module.named_children())
        if not prefix or left < min_num_params or not _has_forward(module) or isinstance(module, nn.Embedding):
            return left
        chosen.add(prefix)
        return 0

    visit("", model)
    return [name for name, _ in model.named_modules() if name in chosen]


def _checked(model: nn.Module, names: list[str]) -> list[str]:
    for name in names:
        module = model.get_submodule(name)
        if not _has_forward(module):
            raise ConfigError(
                f"the module {name!r} ({type(module).__name__}) was chosen by the config, and it has no forward() of "
                f"its own: choose the modules inside of it, for example {name + '.*'!r}"
            )
    return names


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
