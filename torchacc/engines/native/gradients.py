"""`torch.autograd.grad()` and `backward(inputs=…)` of a model's parameters on several devices.

Of sharded ones autograd knows unsharded weights only. Of those that each device has as a whole it computes the device's
own gradients, which are averaged here.
"""

import functools
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchacc.engines.failed_backwards import Backward, clean_up_after
from torchacc.engines.native.shard_arithmetic import (
    OWNER,
    full_tensor,
    gradient_over_data,
    is_of_model,
    local_part,
    mean_over_data,
)
from torchacc.engines.patches import torch_patches
from torchacc.engines.sharded_model import HANDLE
from torchacc.errors import EngineError
from torchacc.parallel.axes import Role
from torchacc.parallel.plan import ShardingPlan

AVERAGE = "_torchacc_average"
"""The attribute by which a parameter that each device has as a whole knows how to average a tensor over the devices."""

_num_without_accumulation = 0
"""How many graphs run now that `torch.autograd.grad()` has asked for."""
_is_kept = False
"""Whether the graph that runs was asked to be kept (`retain_graph=True`)."""


def take_part_in_backward(model: Backward) -> None:
    """Register a model for backward: map parameters in `inputs=` to unsharded weights; clean up where it raises."""
    clean_up_after(model)
    _patch()


def average_ordinary_gradients(model: nn.Module, plan: ShardingPlan) -> None:
    """Reduce the gradients that come to shards from elsewhere than their units, as from an autograd.Function."""
    for planned in plan.parameters:
        parameter: Any = model.get_parameter(planned.name)
        if planned.shape:
            parameter.requires_grad_(True)  # also of a frozen one, which may be trained later
            with torch._C.DisableTorchFunctionSubclass():  # which refuses a script's hooks
                parameter.register_hook(functools.partial(gradient_over_data, parameter._spec))
            parameter.requires_grad_(planned.trainable)


def accumulates() -> bool:
    """Return whether the graph that runs is a `backward()`, which adds to the gradients of parameters."""
    return _num_without_accumulation == 0


def is_graph_kept() -> bool:
    """Return whether another backward of the graph that runs may follow (`retain_graph=True`)."""
    return _is_kept


@functools.cache
def _patch() -> None:
    torch_patches.hold_until_exit(torch_patches.runs_of_graphs(_run_graph))


def _run_graph(
    original: Callable[..., Any],
    outputs: Any,
    grad_outputs: Any,
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[torch.Tensor],
    allow_unreachable: bool,
    accumulate_grad: bool,
) -> Any:
    """Run a graph of autograd's. Collective where gradients of a model's parameters are computed."""
    global _num_without_accumulation, _is_kept
    options, outer = (keep_graph, create_graph), _is_kept
    _is_kept = keep_graph
    try:
        _refuse_some_of_stages(inputs)
        if accumulate_grad:
            inputs = tuple(_with_unsharded_weights(inputs))
            return original(
                outputs, grad_outputs, *options, inputs, allow_unreachable=allow_unreachable, accumulate_grad=True
            )
        averages = [getattr(each, "__dict__", {}).get(AVERAGE) for each in inputs]
        is_known = any(average is not None for average in averages)
        _num_without_accumulation += 1
        try:
            found = original(
                outputs, grad_outputs, *options, inputs, allow_unreachable or is_known, accumulate_grad=False
            )
        finally:
            _num_without_accumulation -= 1
        if not is_known:
            return found
        means = tuple(map(_averaged, averages, inputs, found))
        if not allow_unreachable:
            _check_used(means)
        return means
    finally:
        _is_kept = outer


def _refuse_some_of_stages(inputs: Sequence[torch.Tensor]) -> None:
    """Refuse gradients of some parameters of a model in stages, on which a stage without them would not take part."""
    models = (getattr(each, "__dict__", {}).get(HANDLE) for each in inputs)
    if any(model is not None and model.plan.pipeline.size > 1 for model in models):
        raise EngineError(
            "torch.autograd.grad() or backward(inputs=…) of parameters of a model in stages (config.dist.pp.size): a "
            "gradient is computed by one of them, and all have to take part. Call loss.backward(), and read "
            "parameter.grad"
        )


def _averaged(
    average: Callable[[torch.Tensor], torch.Tensor] | None, parameter: torch.Tensor, own: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the mean of a parameter's gradients over the devices; None where no device has any."""
    if average is None:
        return own
    if own is not None and torch._C._functorch.is_batchedtensor(own):
        raise EngineError(_NO_BATCHES)
    used = torch.tensor([own is not None], dtype=torch.float32, device=parameter.device)
    if not average(used):
        return None
    mean: torch.Tensor = _Mean.apply(torch.zeros_like(parameter) if own is None else own, average)
    return mean


def _check_used(found: Sequence[torch.Tensor | None]) -> None:
    if any(gradient is None for gradient in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )


def _with_unsharded_weights(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    owned = [each for each in given if OWNER in getattr(each, "__dict__", ())]
    weights = [vars(each)[OWNER].unsharded_weight(each) for each in owned]
    return [*given, *(weight for weight in weights if weight is not None)]


_NO_BATCHES = (
    "torch.autograd.grad() of sharded parameters is not available with is_grads_batched=True or where layers are split "
    "over dist.tp or experts spread over dist.ep: call backward(), and read parameter.grad"
)


def gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients as `torch.autograd.grad()` does, of parameters the mean over the devices. Collective.

    A parameter's gradient lies like the parameter. With `create_graph` it is full: an ordinary tensor with a graph.

    Raises:
        EngineError: The gradients would be others than those of the unsharded model.
    """
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    parameters = [each for each in inputs if OWNER in getattr(each, "__dict__", ())]
    weights = {id(each): vars(each)[OWNER].unsharded_weight(each) for each in parameters}
    if parameters and (is_grads_batched or any(_is_computed_in_part(each, weights[id(each)]) for each in parameters)):
        raise EngineError(_NO_BATCHES)
    asked = [each for each in inputs if weights.get(id(each), each) is not None]
    asked = [weights.get(id(each), each) for each in asked]
    # A parameter that is used outside of its unit is in the graph by itself, beside the unsharded weight.
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.autograd.grad(
            outputs,
            [*asked, *parameters],
            grad_outputs,
            retain_graph=retain_graph,
            create_graph=create_graph,
            only_inputs=only_inputs,
            allow_unused=True,
            is_grads_batched=is_grads_batched,
        )
    by_input = {id(each): gradient for each, gradient in zip([*asked, *parameters], found, strict=True)}
    result: list[torch.Tensor | None] = []
    for each in inputs:
        gradient = by_input.get(id(each))
        if id(each) in weights:
            in_forward = by_input.get(id(weights[id(each)]))
            gradient = _of_parameter(each, in_forward, gradient, create_graph)
        if gradient is None and materialize_grads:
            gradient = torch.zeros_like(each)
        if not allow_unused:
            _check_used([gradient])
        result.append(gradient)
    return tuple(result)


def _of_parameter(
    parameter: Any, in_forward: torch.Tensor | None, outside: torch.Tensor | None, create_graph: bool
) -> torch.Tensor | None:
    """Return a parameter's gradient.

    Args:
        parameter: The parameter.
        in_forward: The full gradient by this process's data.
        outside: What came to the shard itself, the mean over the devices.
        create_graph: Whether the gradient is to have a graph.
    """
    spec = _spec(parameter)
    used = torch.tensor([in_forward is not None], dtype=torch.float32, device=parameter.device)
    if mean_over_data(used, spec):  # by any process: all have to take part
        own = in_forward if in_forward is not None else torch.zeros(parameter.shape, device=parameter.device)
        mean: torch.Tensor = _Mean.apply(own.to(parameter.dtype), functools.partial(mean_over_data, spec=spec))
        if create_graph:
            return mean if outside is None else mean + full_tensor(outside)
        shard = DTensor(local_part(mean, spec).contiguous(), spec, requires_grad=False)
        return shard if outside is None else shard + outside
    return full_tensor(outside) if create_graph and is_of_model(outside) else outside


def _spec(parameter: Any) -> Any:
    return parameter._spec


def _is_computed_in_part(parameter: Any, weight: torch.Tensor | None) -> bool:
    """Return whether this process's forward computes with a part of a weight."""
    is_spread = weight is not None and weight.shape != parameter.shape
    return is_spread or Role.TENSOR.value in _spec(parameter).mesh.mesh_dim_names


class _Mean(torch.autograd.Function):
    """Average a tensor over the devices that see different data, and its gradient, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, average: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.average = average
        return average(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Mean.apply(gradient, ctx.average), None


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    """Return the norm of full gradients, or None where none is a DTensor in shards. Collective: every process.

    PyTorch's own, where it looks for the largest element, raises on a rank whose part of a gradient is empty, and the
    other ranks wait.

    Args:
        gradients: Those of which each process holds its parts, and ordinary ones of other models.
        norm_type: The order of the norm, above 0.
    """
    from torch.distributed.tensor import DTensor, Partial

    shards = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if norm_type <= 0 or not shards:
        return None
    alike: dict[Any, list[torch.Tensor]] = {}
    for gradient in shards:
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            return None
        split = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
        alike.setdefault((gradient.device_mesh, split), []).append(gradient.to_local())
    parts = [_combined(mesh, split, local, norm_type) for (mesh, split), local in alike.items()]
    ordinary = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    parts += [torch.linalg.vector_norm(gradient, norm_type) for gradient in ordinary]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([part.to(parts[0]) for part in parts]), norm_type)
    return norm


def _combined(mesh: Any, split: Sequence[int], parts: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of tensors that are split alike, from this process's parts of them."""
    import torch.distributed as dist

    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    filled = [part for part in parts if part.numel()]
    norms = list(torch._foreach_norm(filled, norm_type, dtype)) if filled else []  # of none PyTorch takes no norm
    own = torch.stack(norms) if norms else torch.zeros(1, dtype=dtype)
    total = (own.max() if norm_type == inf else own.pow(norm_type).sum()).to(mesh.device_type)
    for dim in split:
        if norm_type == inf:  # gloo's own maximum loses a NaN
            found = total.new_empty(mesh.size(dim))
            dist.all_gather_into_tensor(found, total.view(1), group=mesh.get_group(dim))
            total = found.max()
        else:
            dist.all_reduce(total, group=mesh.get_group(dim))
    return total if norm_type == inf else total.pow(1 / norm_type)
