"""Recompute activations in backward on XLA devices: from unsharded weights, and with the same random numbers.

PyTorch's non-reentrant checkpoint does the bookkeeping. What it does not know is a device `xla`, that weights are
unsharded only while a unit's forward runs, and that XLA sees that the second computation is the first one and merges
them, unless an optimization barrier stands before it. XLA's CPU client takes barriers away, and merges after that once
more; there the second computation begins with the sum of its inputs and a zero that is a program's input, and so no
zero to XLA.

A model that calls `torch.utils.checkpoint.checkpoint()` by itself comes here, too.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchacc.data.tree import map_tensors, tensors_in
from torchacc.engines.patches import torch_patches
from torchacc.engines.patches.transformers_masks import Answers, documents_of
from torchacc.engines.recompute import statistics_kept
from torchacc.engines.xla import runtime
from torchacc.engines.xla.gather import EDITED_TWICE, Gatherer, UnitHooks, lost_edit


class Recompute:
    """Runs modules of one model so that backward computes them again."""

    def __init__(
        self, units: Sequence[UnitHooks], patches: Callable[[], AbstractContextManager[None]], *, drops_barriers: bool
    ) -> None:
        """Take what all modules of the model share.

        Args:
            units: The hooks of its units.
            patches: Makes the context of patches that its forward runs in.
            drops_barriers: Whether the devices' compiler does, and then merges the two computations.
        """
        self._units, self._patches, self._drops_barriers = units, patches, drops_barriers
        self._units_of: dict[nn.Module, tuple[list[UnitHooks], list[UnitHooks]]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager in which functions that the model has recomputed are run here."""
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a module's forward; without gradients, just that."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        around, own = self._units_around_and_in(module)
        # PyTorch's counts the batch of a function that it runs twice twice, and so does this; not that of a module.
        patches = partial(self._repeating, partial(statistics_kept, module))
        return _checkpointed(self._call(forward, args, kwargs, around=around, own=own, patches=patches))

    def run_function(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function of the model's own choice; the options of PyTorch's `checkpoint()` are among `kwargs`."""
        options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        kwargs = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
        if options.pop("use_reentrant", True) in (True, None) and not _needs_gradient(args):
            with torch.no_grad():  # as PyTorch's reentrant checkpoint() runs it, and says so
                return function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        own = [unit for unit in self._units if not unit.unsharded]
        around = [unit for unit in self._units if unit.unsharded]
        if isinstance(function, nn.Module):
            inside = set(function.modules())
            around = [unit for unit in around if unit.has_weights_in(inside)]
        patches = partial(self._repeating, nullcontext)
        return _checkpointed(self._call(function, args, kwargs, around=around, own=own, patches=patches), **options)

    def _call(self, *args: Any, **kwargs: Any) -> "_Call":
        return _Call(*args, **kwargs, zero=_zero() if self._drops_barriers else None)

    @contextmanager
    def _repeating(self, again: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Hold the context in which a function is repeated; `again` makes what is particular to it."""
        with self.running(), self._patches(), again():
            yield

    def _units_around_and_in(self, module: nn.Module) -> tuple[list[UnitHooks], list[UnitHooks]]:
        """Return the units that have gathered weights for a module before it runs, and those inside of it."""
        if module not in self._units_of:
            inside = set(module.modules())
            own = [unit for unit in self._units if unit.module in inside and unit.module is not module]
            around = [unit for unit in self._units if unit not in own and unit.has_weights_in(inside)]
            self._units_of[module] = around, own
        return self._units_of[module]


_OPTIONS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
"""Arguments of PyTorch's `checkpoint()` that are not the function's."""

_running: list[Recompute] = []
"""The recompute of each model whose forward runs."""


@functools.cache
def know_checkpoint() -> None:
    """Patch PyTorch's `checkpoint()` to run on XLA devices, inside of a sharded model and outside."""
    torch_patches.hold_until_exit(torch_patches.checkpoint_through(_checkpoint))


def _checkpoint(original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _running:
        return _running[-1].run_function(function, args, kwargs)
    if any(tensor.device.type == "xla" for tensor in tensors_in((args, kwargs))):
        on_cpu = runtime.runs_on_cpu()
        return Recompute([], nullcontext, drops_barriers=on_cpu).run_function(function, args, kwargs)
    return original(function, *args, **kwargs)


def _needs_gradient(args: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)


@functools.cache
def _zero() -> torch.Tensor:
    """Return a zero on the device, of shape (1,): torch_xla writes one without dimensions into programs."""
    (zero,) = runtime.to_device([torch.zeros(1)])
    return zero


def _checkpointed(call: "_Call", **options: Any) -> Any:
    """Run a call by PyTorch's `checkpoint()`, with its options."""
    options = {**options, "use_reentrant": False, "preserve_rng_state": False}
    # Without tensors among its arguments PyTorch's checkpoint() looks for no device.
    output = checkpoint.__wrapped__(call, **options)  # type: ignore[attr-defined]
    map_tensors(call.watch_gradient, output)
    return output


class _Call:
    """One run of a function in forward, and its repetition in backward."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        around: Sequence[UnitHooks],
        own: Sequence[UnitHooks],
        patches: Callable[[], AbstractContextManager[None]],
        zero: torch.Tensor | None,
    ) -> None:
        """Record all that the repetition needs.

        Args:
            function: A module's forward, or another function.
            args: Positional arguments.
            kwargs: Keyword arguments.
            around: Units with weights that the function may use whose hooks have run already.
            own: Units that may run within the function.
            patches: Makes the context that it is repeated in.
            zero: A program's input to add where barriers do not hold the repetition up.
        """
        self._function, self._inputs = function, (tuple(args), dict(kwargs))
        self._around, self._own, self._patches = around, own, patches
        self._zero = zero
        self._kept = {unit.gatherer: unit.unsharded for unit in around if unit.gatherer.keeps_weights}
        self._answers = Answers()
        self._has_run = False
        self._again: list[torch.Tensor] | None = None
        """The tensors among the inputs, behind a barrier, once backward has come to the function."""
        self._seed, self._host_seed = runtime.random_seed(), torch.get_rng_state()
        self._autocast: dict[str, Any] = {
            "enabled": torch.is_autocast_enabled("xla"),
            "dtype": torch.get_autocast_dtype("xla"),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def __call__(self) -> Any:
        """Run the function, and at every later call repeat it."""
        if self._has_run:
            return self._repeat()
        self._has_run = True
        args, kwargs = self._inputs
        edited = self._edited_around()
        with self._answers.noted(), self._gathering_for_own_units():
            output = self._function(*args, **kwargs)
        if names := self._edited_around() - edited:
            raise lost_edit(min(names), EDITED_TWICE)
        return output

    def _edited_around(self) -> set[str]:
        return {weight.name for unit in self._around for weight, _ in unit.edited()}

    def unsharded_weights(self, gatherer: Gatherer) -> list[torch.Tensor]:
        """Return the unsharded weights of a unit whose weights the function may use."""
        if self._again is None:
            full = gatherer.gather()
            if gatherer.keeps_weights:
                self._kept[gatherer] = full
            return full
        full = self._kept[gatherer] if gatherer.keeps_weights else gatherer.gather_all_for_backward()
        # What autograd saves depends on what needs a gradient.
        return [
            tensor.detach().requires_grad_(weight.shard.requires_grad)
            for tensor, weight in zip(full, gatherer.weights, strict=True)
        ]

    def watch_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """Put the inputs behind a barrier together with the first gradient that comes back to the function.

        So the repetition depends on that gradient, and no scheduler can have it run earlier.
        """
        # The loss holds its graph, and so this hook, also after backward: the inputs must not live as long.
        reference = weakref.ref(self)

        def arrived(gradient: torch.Tensor) -> torch.Tensor:
            call = reference()
            if call is not None and call._again is None:
                gradient = gradient.clone()
                call._again = call._behind_barrier(gradient)
            return gradient

        if output.requires_grad:
            output.register_hook(arrived)
        return output

    def _behind_barrier(self, *gradients: torch.Tensor) -> list[torch.Tensor]:
        import torch_xla.core.xla_model as xm

        tensors = tensors_in(self._inputs)
        # A mask that a kernel may do without stays what it is: behind a barrier it would be written out.
        again = [tensor if documents_of(tensor) is not None else tensor.detach().clone() for tensor in tensors]
        xm.optimization_barrier_([*(new for new in again if documents_of(new) is None), *gradients])
        if self._zero is not None:
            again = [new + self._zero.to(new.dtype) if new.is_floating_point() else new for new in again]
        return [new.requires_grad_(old.requires_grad) for new, old in zip(again, tensors, strict=True)]

    def _repeat(self) -> Any:
        if self._again is None:
            self._again = self._behind_barrier()
        tensors = iter(self._again)
        args, kwargs = map_tensors(lambda _: next(tensors), self._inputs)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._patches())
                stack.enter_context(self._answers.repeated())
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.set_rng_state(self._host_seed)
                stack.enter_context(runtime.random_numbers_from(self._seed))
                stack.enter_context(torch.autocast("xla", **self._autocast))
                stack.enter_context(self._weights_around())
                stack.enter_context(self._gathering_for_own_units())
                return self._function(*args, **kwargs)
        finally:
            self._again = None

    @contextmanager
    def _gathering_for_own_units(self) -> Iterator[None]:
        """Context manager in which units gather through this object, and save nothing for backward."""
        around = [unit.within for unit in self._own]
        for unit in self._own:
            unit.within = self
        try:
            yield
        finally:
            for unit, outer in zip(self._own, around, strict=True):
                unit.within = outer

    @contextmanager
    def _weights_around(self) -> Iterator[None]:
        for unit in self._around:
            unit.unshard(self.unsharded_weights(unit.gatherer))
        try:
            yield
        finally:
            for unit in self._around:
                unit.reshard()
