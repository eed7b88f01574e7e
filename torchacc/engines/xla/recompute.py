"""Compute activations again in backward on XLA devices: from whole weights, and with the same random numbers.

PyTorch's non-reentrant checkpoint does the bookkeeping. What it does not know is a device `xla`, that weights are whole
only while a unit's forward runs, and that XLA sees that the second computation is the first one and merges them, unless
an optimization barrier stands before it. XLA's CPU client takes barriers away, and merges after that once more; there
the second computation begins with the sum of its inputs and a zero that is a program's input, and so no zero to XLA.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchacc.data.tree import map_tensors
from torchacc.engines.recompute import statistics_kept
from torchacc.engines.xla import runtime
from torchacc.engines.xla.gather import Gatherer, UnitHooks
from torchacc.engines.xla.masks import Answers


class Recompute:
    """Runs modules of one model so that backward computes them again."""

    def __init__(self, units: Sequence[UnitHooks], patches: Callable[[], AbstractContextManager[None]]) -> None:
        """Take what all modules of the model share.

        Args:
            units: The hooks of its units.
            patches: Makes the context of patches that its forward runs in.
        """
        self._units, self._patches = units, patches
        self._units_of: dict[nn.Module, tuple[list[UnitHooks], list[UnitHooks]]] = {}
        self._zero: torch.Tensor | None = None

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a module's forward; without gradients, just that."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if module not in self._units_of:
            self._units_of[module] = self._find_units(module)
        around, own = self._units_of[module]
        if self._zero is None and runtime.runs_on_cpu():
            (self._zero,) = runtime.to_device([torch.zeros(1)])  # torch_xla writes one without dimensions into programs
        call = _Call(module, forward, args, kwargs, around=around, own=own, patches=self._patches, zero=self._zero)
        # Without tensors among its arguments PyTorch's checkpoint() looks for no device.
        output = checkpoint(call, use_reentrant=False, preserve_rng_state=False)
        map_tensors(call.watch_gradient, output)
        return output

    def _find_units(self, module: nn.Module) -> tuple[list[UnitHooks], list[UnitHooks]]:
        """Return the units that have gathered weights for a module before it runs, and those inside of it."""
        inside = set(module.modules())
        own = [unit for unit in self._units if unit.module in inside and unit.module is not module]
        return [unit for unit in self._units if unit not in own and unit.has_weights_in(inside)], own


class _Call:
    """One run of a module in forward, and its repetition in backward."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        around: Sequence[UnitHooks],
        own: Sequence[UnitHooks],
        patches: Callable[[], AbstractContextManager[None]],
        zero: torch.Tensor | None,
    ) -> None:
        """Note all that the repetition needs.

        Args:
            module: The module.
            forward: Its forward.
            args: Positional arguments.
            kwargs: Keyword arguments.
            around: Units with weights in the module whose hooks have run already.
            own: Units inside of the module, whose hooks will run with it.
            patches: Makes the context that the model's forward runs in.
            zero: What to add to the inputs of the repetition, of shape (1,), in float32; None where barriers last.
        """
        self._module, self._forward, self._inputs = module, forward, (tuple(args), dict(kwargs))
        self._around, self._own, self._patches, self._zero = around, own, patches, zero
        self._kept = {unit.gatherer: unit.whole for unit in around if unit.gatherer.keeps_weights}
        self._answers = Answers()
        self._has_run = False
        self._again: list[torch.Tensor] | None = None
        """The tensors among the inputs, behind a barrier, once backward has come to the module."""
        self._seed, self._host_seed = runtime.random_seed(), torch.get_rng_state()
        self._autocast: dict[str, Any] = {
            "enabled": torch.is_autocast_enabled("xla"),
            "dtype": torch.get_autocast_dtype("xla"),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def __call__(self) -> Any:
        """Run the module, and at every later call repeat it."""
        if self._has_run:
            return self._repeat()
        self._has_run = True
        args, kwargs = self._inputs
        with self._answers.noted(), self._gathering_for_own_units():
            return self._forward(*args, **kwargs)

    def whole_weights(self, gatherer: Gatherer) -> list[torch.Tensor]:
        """Return the whole weights of a unit inside of the module."""
        if self._again is None:
            whole = gatherer.gather()
            if gatherer.keeps_weights:
                self._kept[gatherer] = whole
            return whole
        whole = self._kept[gatherer] if gatherer.keeps_weights else gatherer.gather_all_again()
        # What autograd saves depends on what needs a gradient.
        return [
            tensor.detach().requires_grad_(weight.shard.requires_grad)
            for tensor, weight in zip(whole, gatherer.weights, strict=True)
        ]

    def watch_gradient(self, output: torch.Tensor) -> torch.Tensor:
        """Put the inputs behind a barrier together with the first gradient that comes back to the module.

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

        tensors: list[torch.Tensor] = []
        map_tensors(tensors.append, self._inputs)
        again = [tensor.detach().clone() for tensor in tensors]
        xm.optimization_barrier_([*again, *gradients])
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
                stack.enter_context(statistics_kept(self._module))
                stack.enter_context(self._weights_around())
                stack.enter_context(self._gathering_for_own_units())
                return self._forward(*args, **kwargs)
        finally:
            self._again = None

    @contextmanager
    def _gathering_for_own_units(self) -> Iterator[None]:
        """Let the units inside of the module gather through this object, and save nothing for backward."""
        for unit in self._own:
            unit.within = self
        try:
            yield
        finally:
            for unit in self._own:
                unit.within = None

    @contextmanager
    def _weights_around(self) -> Iterator[None]:
        for unit in self._around:
            unit.lay(self.whole_weights(unit.gatherer))
        try:
            yield
        finally:
            for unit in self._around:
                unit.lift()
