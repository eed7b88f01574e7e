"""Run layers that are alike as one loop of the program, so that compiling takes as long for many as for one.

The layers' shards are stacked, and the loop's body is the first layer's forward with one slice of each in the place of
its weights, gathered inside of the body: no more than one layer is unsharded at once. Backward is a second loop, from
the last layer to the first, which computes each layer again from its input: what forward keeps is the inputs alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from torchacc.data.tree import map_tensors
from torchacc.engines.patches.loop_counter import counter_has_32_bits
from torchacc.engines.patches.loop_seed import seed_is_recognised
from torchacc.engines.xla import runtime
from torchacc.engines.xla.gather import Gatherer, UnitHooks, lost_edit, storage_and_edits
from torchacc.errors import EngineError

Patches = Callable[[], AbstractContextManager[None]]
"""Makes the context of patches that a model's forward runs in."""
Unshard = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns the unsharded weight from its name in a layer and its shard, connected to it for autograd."""


class ScannedList(nn.ModuleList):
    """A `ModuleList` that a model's forward goes through as if its one element were the loop over all of them."""

    scan: "LayerScan"

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the layers, or while the model runs over the loop."""
        return iter([self.scan]) if self.scan.is_running else super().__iter__()  # type: ignore[list-item]

    def __getitem__(self, index: Any) -> Any:
        """Return a layer, or some; while the model runs, all of them or none."""
        if not (self.scan.is_running and isinstance(index, slice)):
            return super().__getitem__(index)
        if range(len(self))[index] != range(len(self)):
            raise EngineError(
                "compute.scan_layers: the model runs a part of its layers, and the loop runs all: set "
                "config.compute.scan_layers = False"
            )
        return self


class LayerScan:
    """The layers of one `ModuleList`, run as a loop."""

    def __init__(
        self,
        layers: nn.ModuleList,
        units: Sequence[UnitHooks],
        *,
        unshard: Unshard,
        annotate_stack: Callable[[str, torch.Tensor], None],
        annotate_output: Callable[[torch.Tensor], None],
        patches: Patches,
    ) -> None:
        """Take the layers as they are sharded.

        Args:
            layers: Layers of one class, with parameters of the same names, shapes and dtypes.
            units: The first layer, as a unit, and those inside of it.
            unshard: Gathers a weight.
            annotate_stack: Says how the stacked shards of the parameter of a name are split.
            annotate_output: Says how a layer's output is split.
            patches: Makes the context of patches that the model's forward runs in.
        """
        self.is_running = False
        """Whether the model's forward runs."""
        self._layers, self._units = list(layers), units
        self._num_hooks = _count_hooks(self._layers)
        paths = {name: name.rpartition(".") for name, _ in layers[0].named_parameters()}
        self._owners = {name: (layers[0].get_submodule(path), leaf) for name, (path, _, leaf) in paths.items()}
        self._unshard, self._annotate_stack, self._annotate_output = unshard, annotate_stack, annotate_output
        self._patches = patches
        layers.__class__ = ScannedList
        vars(layers)["scan"] = self

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers one after another; all take the same further arguments.

        Args:
            hidden: The first layer's input. Each layer returns a tensor of the same shape and dtype.
            args: Further positional arguments of each layer, of which no tensor needs a gradient.
            kwargs: Keyword arguments of each layer.
        """
        has_cache = any(map(_is_cache, (*args, *kwargs.values())))
        if has_cache and not torch.is_grad_enabled():  # each layer has a part of it
            for layer in self._layers:
                hidden = layer(hidden, *args, **kwargs)
            return hidden
        if _count_hooks(self._layers) != self._num_hooks:
            raise EngineError(
                "compute.scan_layers: a hook was registered on a layer, or intermediate outputs were asked for, and "
                "the loop runs the first layer's code for all: set config.compute.scan_layers = False"
            )
        inputs = (
            [None if _is_cache(value) else value for value in args],
            {key: None if _is_cache(value) else value for key, value in kwargs.items()},
        )
        map_tensors(_check_needs_no_gradient, inputs)
        stacks = [torch.stack([layer.get_parameter(name) for layer in self._layers]) for name in self._owners]
        for name, stack in zip(self._owners, stacks, strict=True):
            self._annotate_stack(name, stack)
        if torch.is_grad_enabled():
            output: torch.Tensor = _Scan.apply(self._run, self._patches, inputs, hidden, *stacks)
            return output
        (output,), _ = _loop(lambda carry, shards: ([self._run(carry[0], shards, inputs)], []), [hidden], stacks)
        return output

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager in which the model's forward finds the loop in the place of the layers."""
        was, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = was

    def _run(self, hidden: torch.Tensor, shards: Sequence[torch.Tensor], inputs: Any) -> torch.Tensor:
        """Run the first layer's forward with these shards in the place of its own."""
        args, kwargs = inputs
        with self._unsharded(shards):
            output = self._layers[0].forward(hidden, *args, **kwargs)
        if not isinstance(output, torch.Tensor) or (output.shape, output.dtype) != (hidden.shape, hidden.dtype):
            raise EngineError(
                f"compute.scan_layers: {type(self._layers[0]).__name__} does not return one tensor in the shape and "
                "dtype of its first argument, which a loop over layers needs: set config.compute.scan_layers = False"
            )
        self._annotate_output(output)
        return output

    def unsharded_weights(self, gatherer: Gatherer) -> list[torch.Tensor]:
        """Return the weights of a unit that are gathered now, for which its own are not."""
        return [vars(owner)[name] for (owner, name), *_ in (weight.owners for weight in gatherer.weights)]

    @contextmanager
    def _unsharded(self, shards: Sequence[torch.Tensor]) -> Iterator[None]:
        laid: list[tuple[str, torch.Tensor, Any]] = []
        for (name, (owner, attribute)), shard in zip(self._owners.items(), shards, strict=True):
            tensor = self._unshard(name, shard)
            laid.append((name, tensor, storage_and_edits(tensor)))
            owner.__dict__[attribute] = tensor
        for unit in self._units:
            unit.within = self
        try:
            yield
        finally:
            for unit in self._units:
                unit.within = None
            for owner, attribute in self._owners.values():
                owner.__dict__.pop(attribute, None)
        for name, tensor, before in laid:
            if storage_and_edits(tensor) != before:
                raise lost_edit(name, "compute.scan_layers = True runs one layer's code for all of them")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., torch.Tensor],
        patches: Patches,
        inputs: Any,
        hidden: torch.Tensor,
        *stacks: torch.Tensor,
    ) -> torch.Tensor:
        ctx.run, ctx.patches, ctx.inputs, ctx.seed = run, patches, inputs, runtime.random_seed()
        ctx.autocast = {
            "enabled": torch.is_autocast_enabled("xla"),
            "dtype": torch.get_autocast_dtype("xla"),
            "cache_enabled": False,
        }

        def body(carry: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> Any:
            return [run(carry[0], shards, inputs)], [carry[0].clone()]

        (output,), (layer_inputs,) = _loop(body, [hidden], list(stacks))
        ctx.save_for_backward(layer_inputs, *stacks)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[4:]

        def body(carry: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]) -> Any:
            with torch.enable_grad():
                hidden, *shards = [tensor.detach() for tensor in slices]
                hidden.requires_grad_()
                wanted = [shard.requires_grad_() for shard, need in zip(shards, needed, strict=True) if need]
                output = ctx.run(hidden, shards, ctx.inputs)
                found = torch.autograd.grad(output, [hidden, *wanted], carry[0], allow_unused=True)
            of_hidden, *of_shards = (
                torch.zeros_like(tensor) if grad is None else grad
                for grad, tensor in zip(found, [hidden, *wanted], strict=True)
            )
            return [of_hidden], of_shards

        with ctx.patches(), runtime.random_numbers_from(ctx.seed), torch.autocast("xla", **ctx.autocast):
            (hidden,), found = _loop(body, [gradient], list(ctx.saved_tensors), reverse=True)
        gradients = iter(found)
        return None, None, None, hidden, *(next(gradients) if need else None for need in needed)


def _loop(
    body: Callable[..., Any], carry: list[torch.Tensor], slices: list[torch.Tensor], *, reverse: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Record a loop over the first dimension of tensors; returns what is carried out of it, and stacked results."""
    from torch_xla.experimental.scan import _scan_impl_flat

    with torch.no_grad(), seed_is_recognised(), counter_has_32_bits():
        carried, stacked = _scan_impl_flat(body, carry, slices, reverse=reverse)
    return carried, stacked


def _is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers' for generation."""
    return hasattr(value, "get_seq_length")


def _count_hooks(layers: Sequence[nn.Module]) -> int:
    modules = [module for layer in layers for module in layer.modules()]
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in modules)


def _check_needs_no_gradient(tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise EngineError(
            "compute.scan_layers: a further argument of the layers needs a gradient, which the loop would lose: set "
            "config.compute.scan_layers = False"
        )
