"""`torch.compile` of units, each by itself, so that units that are alike share a graph.

What is compiled is a unit's `forward`, and not its call: the hooks that gather its weights run around it, and recompute
runs it again. A unit that holds other units, or modules that are recomputed, is left as it is, as is the model
around its units, but for the loss that transformers has as a function.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torchacc.config import Config
from torchacc.config.names import nearest
from torchacc.engines import recompute
from torchacc.engines.compile_report import WARM_UP_STEPS, CompileReport
from torchacc.engines.patches import torch_compile
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import OF_THIS_RANK, get_logger
from torchacc.parallel.plan import ShardingPlan

_log = get_logger(__name__)

_INDUCTOR = "inductor"


def check(config: Config, device: torch.device) -> None:
    """Refuse what cannot be compiled, before anything is started; for a config with `compute.compile`.

    Raises:
        ConfigError: The compiler's needs are missing, or the config asks for what is not compiled.
    """
    compute = config.compute
    if config.memory.offload_activations and device.type != "cpu":
        raise ConfigError(
            "compute.compile = True with memory.offload_activations = True is not available: what a compiled forward "
            "saves is not seen one tensor at a time. Use config.memory.gc = True in its place"
        )
    if config.memory.gc_policy != "full":
        raise ConfigError(
            f"compute.compile = True with memory.gc_policy = {config.memory.gc_policy!r} is not available: "
            "torch.compile compiles nothing while PyTorch keeps single results. Leave config.memory.gc_policy at "
            "'full', or compile at False"
        )
    backends = torch.compiler.list_backends(exclude_tags=())
    if compute.compile_backend not in backends:
        raise ConfigError(
            f"compute.compile_backend = {compute.compile_backend!r} is not a backend of torch.compile here; "
            f"{nearest(compute.compile_backend, backends)}"
        )
    why = torch_compile.why_it_cannot(device) if compute.compile_backend == _INDUCTOR else None
    if why is not None:
        raise ConfigError(f"compute.compile = True cannot be had on this machine: {why}. Or leave compile at False")


def check_regions(plan: ShardingPlan) -> None:
    """Refuse to compile the whole of a model whose loss is computed in chunks, of which graphs know nothing.

    Raises:
        ConfigError: The model is the only unit.
    """
    if regions(plan) == ("",):
        raise ConfigError(
            "compute.compile = True with compute.chunked_loss, and the model has no units but itself, whose graphs "
            "would have the head and the loss in them. Choose its layers by config.dist.fsdp.wrap_layer_cls, or leave "
            "one of the two out"
        )


def prepare(config: Config) -> None:
    """Make torch.compile ready for a process's models."""
    torch_compile.prepare()
    if config.compute.compile_cache is None:
        return
    folder = Path(config.compute.compile_cache).expanduser().absolute()
    used = torch_compile.keep_programs_in(folder)
    if used != folder:
        _log.warning("compute.compile_cache = %s: TORCHINDUCTOR_CACHE_DIR in the environment says %s", folder, used)


def regions(plan: ShardingPlan) -> tuple[str, ...]:
    """Return the modules to compile: units, and modules that are recomputed, that hold no other of them."""
    names = list(dict.fromkeys([*(unit.name for unit in plan.units), *plan.recomputed]))

    def holds_another(name: str) -> bool:
        return any(other != name and (not name or other.startswith(f"{name}.")) for other in names)

    return tuple(name for name in names if not holds_another(name))


class CompiledUnits:
    """The compiled functions of one model."""

    def __init__(self, model: nn.Module, plan: ShardingPlan, config: Config) -> None:
        """Wrap the forwards of units, and a transformers model's loss, in `torch.compile`. Nothing is compiled yet.

        A loss in chunks is left as it is: what takes its time are matmuls, which need no compiler.
        """
        compute = config.compute
        self._compile: Callable[..., Any] = functools.partial(
            torch.compile,
            backend=compute.compile_backend,
            mode=None if compute.compile_mode == "default" else compute.compile_mode,
            dynamic=compute.compile_dynamic,
        )
        self._model_config: Any = getattr(model, "config", None)
        self._has_float8 = compute.fp8
        self._runs_eagerly = False
        self._has_said = False
        self._model = model
        self._own: dict[str, Callable[..., Any]] = {}
        """The forwards of what is compiled, by the module's name."""
        self._not_one_graph: set[Callable[..., Any]] = set()
        """Forwards of classes that break the graph where they are to be recomputed inside of it."""
        names = regions(plan)
        for name in names:
            module = model.get_submodule(name)
            self._own[name] = module.forward
            module.forward = self._switched(module.forward, _refusing_writes(module, self._compile(module.forward)))
        has_loss = isinstance(getattr(type(model), "loss_function", None), property) and names != ("",)
        if has_loss and not compute.chunked_loss:
            transformers_model: Any = model
            own = transformers_model.loss_function
            transformers_model.loss_function = self._switched(own, self._compile(own))
        _log.info("%d modules are compiled by torch.compile, each when it first runs", len(names))

    def _switched(self, own: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            # Float8Layer leaves inference mode, which a graph cannot.
            eagerly = self._runs_eagerly or (self._has_float8 and torch.is_inference_mode_enabled())
            return (own if eagerly else compiled)(*args, **kwargs)

        return run

    def recompute_inside(self, name: str) -> None:
        """Recompute a module inside of its graph, which takes the host less time.

        Where it cannot be one graph, it stays as it is: compiled, and recomputed by PyTorch's checkpoint around it.
        """
        module, own = self._model.get_submodule(name), self._own.get(name)
        if not isinstance(own, MethodType):  # it is not a region, or a script's function
            return
        around, function = module.forward, own.__func__
        # As a method of the class, so that modules that are alike share a graph.
        compiled = self._compile(MethodType(_checkpointed(function), own.__self__), fullgraph=True)
        inside = _refusing_writes(module, compiled)

        @functools.wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            may_be_inside = function not in self._not_one_graph and not self._runs_eagerly
            if may_be_inside and recompute.runs_through(module):
                try:
                    return inside(*args, **kwargs)
                except Exception as error:
                    if not torch_compile.is_refusal(error):
                        raise
                    self._not_one_graph.add(function)  # nothing has run yet
                    _log.debug("%s and its like are recomputed around their graphs: %s", name, error)
            return around(*args, **kwargs)

        module.forward = run

    def without_cache(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a forward's arguments with `use_cache=False`, where it has labels and does not say otherwise.

        A cache is another object in each layer, so that each layer would be compiled by itself.
        """
        keeps = getattr(self._model_config, "use_cache", False) and kwargs.get("past_key_values") is None
        is_asked = kwargs.get("use_cache") is not None
        return {**kwargs, "use_cache": False} if keeps and not is_asked and kwargs.get("labels") is not None else kwargs

    @contextmanager
    def of_call(self, kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Context manager for a forward of the model, which runs eagerly where it returns what its layers note.

        A gradient may begin at that, inside of a unit, where no hook could gather the weights of a compiled one.
        """
        asked = _noted_outputs(self._model_config, kwargs)
        if asked and not self._has_said and torch.is_grad_enabled():
            self._has_said = True
            _log.warning(
                "%s returns what layers note on the way: this forward, and each like it, runs without "
                "config.compute.compile",
                " and ".join(asked),
            )
        before, self._runs_eagerly = self._runs_eagerly, bool(asked)
        try:
            yield
        finally:
            self._runs_eagerly = before


def _refusing_writes(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's compiled forward that raises where it writes to a tensor of the module before a backward.

    torch.compile may compute in backward, once more, what the forward has read from the tensor, and reads it then as it
    was left: gradients would be wrong without a word.
    """

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args, **kwargs)
        output, written = recompute.written_by(module, functools.partial(compiled, *args, **kwargs))
        if written is not None and any(getattr(leaf, "requires_grad", False) for leaf in tree_leaves(output)):
            raise EngineError(
                f"compute.compile = True, and the forward of {type(module).__name__} writes to its tensor {written!r}: "
                "torch.compile may compute gradients with what is written in the place of what was read. Assign a new "
                "tensor to the attribute in place of writing to it, or set config.compute.compile = False"
            )
        return output

    return run


@functools.cache
def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a class that is recomputed in backward."""

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Keywords in the closure: checkpoint() would take some for options of its own.
        return checkpoint(lambda *args: forward(self, *args, **kwargs), *args, use_reentrant=False)

    # Of each class's own, as torch.compile counts by it how often it compiles anew, and reports it by name.
    run.__code__ = run.__code__.replace(co_name=getattr(forward, "__qualname__", type(forward).__name__))
    return run


def _noted_outputs(config: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the options of transformers, given by argument or by the model's config, that ask for more outputs."""
    names = ("output_attentions", "output_hidden_states", "output_router_logits")
    return [name for name in names if kwargs.get(name, getattr(config, name, False))]


class RecompileWatch:
    """Says when a step compiles something again that is not new."""

    def __init__(self) -> None:
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._num_known = 0
        self._has_warned = False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what was compiled again since the last step of any optimizer; the first time, warn."""
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._has_warned:
            return
        found = torch_compile.compiled_so_far().recompiles
        new, self._num_known = [each for each in found[self._num_known :] if not each.is_of_mode], len(found)
        if new and step > WARM_UP_STEPS:
            self._has_warned = True
            _log.warning(
                "compiled anew: %s, up to step %d of %s. Later ones are listed by torchacc.compile_report(); batches "
                "of many lengths are padded to a few by config.dataloader.buckets, or take "
                "config.compute.compile_dynamic = True",
                new[0],
                step,
                type(optimizer).__name__,
                extra=OF_THIS_RANK,
            )


watch = RecompileWatch()


def report() -> CompileReport:
    """Return what torch.compile has compiled in this process so far."""
    found = torch_compile.compiled_so_far()
    return CompileReport(
        graphs=found.graphs,
        secs=found.secs,
        persistent_cache_hits=found.read_from_disk,
        recompiles=tuple(map(str, found.recompiles)),
        breaks=found.breaks,
    )
