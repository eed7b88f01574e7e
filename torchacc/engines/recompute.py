"""Recompute modules of a model in backward, by the engine's own function."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from torchacc.engines.patches.private_names import NormBase, SpectralNorm
from torchacc.errors import EngineError
from torchacc.logging import get_logger
from torchacc.parallel.units import is_checkpointing_layer

_log = get_logger(__name__)

Forward = Callable[..., Any]
Checkpoint = Callable[[nn.Module, Forward, Sequence[Any], Mapping[str, Any]], Any]
"""Runs a module's forward, the function, with its arguments, and has it recomputed in backward."""


def install(model: nn.Module, names: Sequence[str], checkpoint: Checkpoint) -> None:
    """Wrap the forwards of modules in `checkpoint`.

    Their forwards are replaced, not their calls, so that hooks, such as those that gather weights, run once and outside
    of it.

    Args:
        model: The model, whose own recompute, where it has any, is replaced.
        names: The modules' names.
        checkpoint: The engine's function.
    """
    if not names:
        return
    modules = [model.get_submodule(name) for name in names]
    _switch_transformers(model, on=any(map(is_checkpointing_layer, modules)))
    for module in modules:
        module.forward = _through(checkpoint, module)
        if is_checkpointing_layer(module):
            # It leaves out its caches then, which a second run would fill again, and would call this to recompute.
            module.gradient_checkpointing = True  # type: ignore[assignment]
            module._gradient_checkpointing_func = _just_run  # type: ignore[assignment]
    _log.info("%d modules are recomputed in backward: %s", len(names), _shortened(names))


def has_buffers(module: nn.Module) -> bool:
    """Return whether a module has buffers, to which its forward may write, as those of norms with statistics do."""
    return next(module.buffers(), None) is not None


def written_by(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what a function gives, and the name of a tensor of a module that it has written to.

    Not looked at: what norms with running statistics and spectral norms write, which they read in backward as it was
    written, or not at all.
    """
    before = [(part, *each, version_of(each[1])) for part in module.modules() for each in _tensors_of(part)]
    output = run()
    for part, name, tensor, version in before:
        if version_of(tensor) != version:
            path = next(path for path, other in module.named_modules() if other is part)
            return output, f"{path}.{name}" if path else name
    return output, None


def _tensors_of(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a module has itself, by name: parameters, buffers and plain attributes."""
    if isinstance(part, SpectralNorm):
        return
    buffers = ((name, buffer) for (_, name), buffer in _buffers_of(part))
    for name, each in (*part._parameters.items(), *buffers, *vars(part).items()):
        if isinstance(each, torch.Tensor):
            yield name, each


def runs_through(module: nn.Module) -> bool:
    """Return whether a forward of a module that was installed is one that is recomputed in backward."""
    return torch.is_grad_enabled() and (module.training or not is_checkpointing_layer(module))


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Context manager in which a module's forward does not count a batch in the statistics of its norms again."""
    norms = [norm for norm in module.modules() if isinstance(norm, NormBase) and norm.track_running_stats]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            with _disable_current_modes():  # PyTorch's policy of what is kept counts operations
                norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def _switch_transformers(model: nn.Module, *, on: bool) -> None:
    """Turn recompute off in all layers of transformers, and say to the modules around them whether any has it on."""
    for module in model.modules():
        if isinstance(getattr(module, "gradient_checkpointing", None), bool):
            module.gradient_checkpointing = on and not is_checkpointing_layer(module)  # type: ignore[assignment]


def _through(checkpoint: Checkpoint, module: nn.Module) -> Forward:
    forward, may_cache = module.forward, is_checkpointing_layer(module)
    parameters = tuple(module.parameters())  # not the unsharded weights of a forward, with versions of their own

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if may_cache and not module.training:
            return forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return checkpoint(module, forward, args, kwargs)
        again = _with_weights_of_first_run(module, parameters, _with_buffers_of_first_run(module, forward))
        return checkpoint(module, again, args, kwargs)

    return run


def _with_weights_of_first_run(module: nn.Module, parameters: Sequence[nn.Parameter], forward: Forward) -> Forward:
    """Return a module's forward that raises where a further run would have other weights than its first one.

    Autograd notices weights that are written to by what it has saved of them; of a module that is recomputed it has
    saved nothing.
    """
    first: list[tuple[int, bool]] | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if not torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                weights = [(each._version, each.requires_grad) for each in parameters]
            if first is not None and weights != first:
                raise EngineError(
                    f"a weight of {type(module).__name__} has changed, or was frozen, between the module's forward "
                    "and backward, in which memory.gc computes it again: gradients would be those of neither. "
                    "Change weights after backward(), or set config.memory.gc = False"
                )
            first = weights
        return forward(*args, **kwargs)

    return run


def _with_buffers_of_first_run(module: nn.Module, forward: Forward) -> Forward:
    """Return a module's forward that begins each further run with the buffers that its first run has begun with.

    It leaves what the first run has written to them, as a counter, or the vectors of a spectral norm.
    """
    written: dict[_Buffer, torch.Tensor | None] | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal written
        if torch.compiler.is_compiling():  # what is compiled writes buffers when all of it is over
            return forward(*args, **kwargs)
        if written is not None:
            with _buffers_replaced(written):
                return forward(*args, **kwargs)
        before = {where: (buffer, version_of(buffer)) for where, buffer in _buffers(module)}
        copies = _copies({where: buffer for where, (buffer, _) in before.items()})
        output = forward(*args, **kwargs)
        now = {where: (buffer, version_of(buffer)) for where, buffer in _buffers(module)}
        written = {where: copies[where] for where, old in before.items() if not _is_same(old, now.get(where))}
        return output

    return run


_Buffer = tuple[nn.Module, str]
"""A module and the name of a buffer that it has itself."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _buffers(module: nn.Module) -> Iterator[tuple[_Buffer, torch.Tensor | None]]:
    """Yield a module's buffers but those that `statistics_kept()` keeps."""
    for part in module.modules():
        yield from _buffers_of(part)


def _buffers_of(part: nn.Module) -> Iterator[tuple[_Buffer, torch.Tensor | None]]:
    for name, buffer in part._buffers.items():
        if not (isinstance(part, NormBase) and name in _STATISTICS):
            yield (part, name), buffer


def version_of(tensor: torch.Tensor | None) -> int:
    """Return how often a tensor was written to."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor is None or tensor.is_inference() else tensor._version


def _is_same(old: tuple[torch.Tensor | None, int], new: tuple[torch.Tensor | None, int] | None) -> bool:
    return new is not None and new[0] is old[0] and new[1] == old[1]


def _copies(buffers: Mapping[_Buffer, torch.Tensor | None]) -> dict[_Buffer, torch.Tensor | None]:
    """Return copies, of which those of one tensor are one."""
    with _disable_current_modes():
        made = {id(buffer): None if buffer is None else buffer.detach().clone() for buffer in buffers.values()}
    return {where: made[id(buffer)] for where, buffer in buffers.items()}


@contextmanager
def _buffers_replaced(values: Mapping[_Buffer, torch.Tensor | None]) -> Iterator[None]:
    """Context manager in which buffers have other values, which may be written to."""
    kept = {(part, name): part._buffers.get(name) for part, name in values}
    for (part, name), value in _copies(values).items():
        part._buffers[name] = value
    try:
        yield
    finally:
        for (part, name), buffer in kept.items():
            part._buffers[name] = buffer


def _just_run(forward: Forward, *args: Any) -> Any:
    return forward(*args)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, …, {names[-1]}"
