"""Which modules become units, and which are recomputed in backward."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from torchacc.config.names import did_you_mean
from torchacc.errors import ConfigError

if TYPE_CHECKING:
    from torchacc.config.sections import FSDPConfig, MemoryConfig


def select_units(model: nn.Module, config: "FSDPConfig") -> list[str]:
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


def select_recomputed(model: nn.Module, config: "MemoryConfig", units: Sequence[str]) -> tuple[str, ...]:
    """Choose the modules whose activations are recomputed in backward.

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
        if has_forward(child):
            yield child
        else:
            yield from _runnable(child)


def _by_class(model: nn.Module, names: set[str], option: str) -> list[str]:
    candidates = {type(module).__name__ for name, module in model.named_modules() if name}
    modules = [name for name, _ in model.named_modules()]
    for name in sorted(names - candidates):
        if any(fits(module, name) for module in modules):
            hint = f"it names modules, and config.dist.fsdp.wrap_modules = {{{name!r}}} takes names of modules."
        else:
            layers = sorted(infer_layer_classes(model))
            hint = did_you_mean(name, layers) or (f"its repeated layers are {', '.join(layers)}." if layers else "")
            hint = hint or did_you_mean(name, candidates) or "none has a name like it."
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
        if not any(fits(name, pattern) for name in names):
            raise ConfigError(
                f"config.dist.fsdp.wrap_modules has the pattern {pattern!r}, which fits no module of "
                f"{type(model).__name__}: its modules are {', '.join(names[:12])}{', …' if len(names) > 12 else ''}"
            )
    chosen = [name for name in names if any(fits(name, pattern) for pattern in rule)]
    return _checked(model, chosen)


def fits(name: str, pattern: str) -> bool:
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
        if not prefix or left < min_num_params or not has_forward(module) or isinstance(module, nn.Embedding):
            return left
        chosen.add(prefix)
        return 0

    visit("", model)
    return [name for name, _ in model.named_modules() if name in chosen]


def _checked(model: nn.Module, names: list[str]) -> list[str]:
    for name in names:
        module = model.get_submodule(name)
        if not has_forward(module):
            raise ConfigError(
                f"the module {name!r} ({type(module).__name__}) was chosen by the config, and it has no forward() of "
                f"its own: choose the modules inside of it, for example {name + '.*'!r}"
            )
    return names


def has_forward(module: nn.Module) -> bool:
    """Return whether a module has a `forward` of its own."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
