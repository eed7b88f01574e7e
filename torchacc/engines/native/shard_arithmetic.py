"""Give a script's own computations with shards the numbers of full tensors.

PyTorch's distributed tensors give other numbers where parts of a sum meet an addition (`w.norm() + 1`) or shards are
uneven (`w.mean()`), lose what is written to a view of them, and refuse to meet an ordinary tensor. Here only what is
known to be right is left to them: element by element, on tensors that lie alike. For all else they are gathered,
and what comes out is an ordinary tensor, the same on each process; what is written in place is cut up again.

A call with a gathered tensor is collective: every process has to make it.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from torchacc.engines.native import script_reads
from torchacc.engines.native.function_kinds import WRITING_DUNDERS, Function, FunctionKind, kind_of
from torchacc.engines.patches import torch_patches
from torchacc.engines.tensor_functions import WITHOUT_GRADIENT
from torchacc.errors import CheckpointError, EngineError
from torchacc.parallel.axes import Role
from torchacc.parallel.sharding import chunk

if TYPE_CHECKING:
    from torchacc.engines.native.fsdp_groups import FSDPGroups

OWNER = "_torchacc_owner"
"""The attribute by which a sharded parameter knows the `FSDPGroups` that it is in."""
_COPY = "_torchacc_copy"
"""The attribute of what stands for a view of a sharded tensor, and is a copy of it: weak references to its memory."""
_USED = "_torchacc_used"
"""The attribute that says that a graph was made through a tensor."""


@functools.cache
def install() -> None:
    """Route functions of PyTorch's distributed tensors through `call()`, until the process ends."""
    torch_patches.hold_until_exit(torch_patches.functions_of_dtensors(call))


_kinds: dict[Function, FunctionKind] = {}


def call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of PyTorch's with distributed tensors among its arguments."""
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = kind_of(func)
    if kind is FunctionKind.PLAIN:  # the most, such as attributes, of which an optimizer asks for many
        return _call_as_is(func, args, kwargs)
    # A function of torch.nn.init draws or fills, and its own work needs no gradient.
    if getattr(func, "__module__", None) == "torch.nn.init" and torch.is_grad_enabled():
        with torch.no_grad():
            return call(func, args, kwargs)
    if kind is FunctionKind.NUMEL:
        return prod(script_reads.full_shape(_tensors_in(args, kwargs)[0]))
    if kind is FunctionKind.ITERATE:
        return iter(call(torch.Tensor.unbind, args, kwargs))
    if kind in (FunctionKind.SET_DATA, FunctionKind.GET_DATA, FunctionKind.SET_GRADIENT, FunctionKind.HOOK):
        is_of_parameter = any(map(is_of_model, args))
        return _call_of_parameter(kind, func, args, kwargs) if is_of_parameter else _call_as_is(func, args, kwargs)
    tensors = _tensors_in(args, kwargs)
    shards = [tensor for tensor in tensors if is_of_model(tensor)]
    if not shards:
        return _call_as_is(func, args, kwargs)
    if kind is FunctionKind.PICKLE:
        raise CheckpointError(
            "torch.save() or pickle of a sharded tensor would write this process's part alone, which loads nowhere. "
            "For a checkpoint, torchacc.checkpoint.save(folder, model=model, optimizer=optimizer) on every process; "
            "for a file of full weights, torch.save(torchacc.full_state_dict(model), file), where full_state_dict() "
            "is called by every process; of an optimizer, torchacc.optim_state_dict(model, optimizer)"
        )
    if kind is FunctionKind.GRADIENTS:
        from torchacc.engines.native.gradients import gradients

        return gradients(*args, **kwargs)
    if kind is FunctionKind.COPY:
        return _copied(args[0], args[1])
    targets = _targets(func, args, kwargs)
    _check_targets(func, targets)
    if kind is FunctionKind.ELEMENTWISE and not _asks_for_mean(func, shards) and _lie_alike(func, tensors, args):
        with suppress(NotImplementedError), _lists_may_be_unknown():  # of this function, or with this torch
            return _with_mark_of(args, _call_as_is(func, args, kwargs))
    if not targets and kind not in (FunctionKind.ELEMENTWISE, FunctionKind.RANDOM):
        script_reads.refuse_other_stages(func.__name__, shards)
    if kind is FunctionKind.RANDOM:
        return _draw(func, args, kwargs, shards[0])
    if kind is FunctionKind.NORM and _is_total_norm(args, kwargs) and all(map(_has_no_empty_part, shards)):
        return _call_as_is(func, args, kwargs)
    if kind is FunctionKind.JOIN and all(map(_is_partial, shards)) and len(shards) == len(tensors):
        return _call_as_is(func, args, kwargs)
    if any(map(is_of_model, targets)):
        return _write(func, args, kwargs, targets)
    output = func(*_full_tensors(args), **_full_tensors(kwargs))
    if kind is FunctionKind.VIEW and not any(map(_needs_graph, shards)) and any(map(_is_split_or_copy, shards)):
        return tree_map(lambda leaf: _as_copy(leaf, shards[0]) if isinstance(leaf, torch.Tensor) else leaf, output)
    return script_reads.total_of_stages(func.__name__, shards, output)


@contextmanager
def _lists_may_be_unknown() -> Iterator[None]:
    """Raise PyTorch's usual error where it has no sharding rule for a function of lists."""
    try:
        yield
    except AssertionError as error:
        if "found no DeviceMesh" not in str(error):
            raise
        raise NotImplementedError from error


def is_of_model(tensor: Any) -> bool:
    """Return whether a tensor is distributed over the devices that share a model's parameters."""
    return isinstance(tensor, DTensor) and Role.SHARD.value in (tensor._spec.mesh.mesh_dim_names or ())


# Which way


def _tensors_in(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _targets(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a function writes to."""
    if kwargs.get("out") is not None:
        return _tensors_in(kwargs["out"], {})
    name = func.__name__
    in_place = name.endswith("_") and not name.endswith("__")
    if not (in_place or name in WRITING_DUNDERS or kwargs.get("inplace") is True):
        return []
    if name.startswith("_fused_"):
        return _tensors_in([arg for arg in args if isinstance(arg, list | tuple)], {})
    return _tensors_in([*args, *kwargs.values()][:1], {})  # by its name in torch.nn.init


def _check_targets(func: Function, targets: Sequence[torch.Tensor]) -> None:
    for target in targets:
        if any(not memory.expired() for memory in getattr(target, _COPY, ())):  # else nobody can see that it differs
            raise EngineError(
                f"{func.__name__}() would write to a part of a sharded tensor that was taken by indexing, view() or "
                "the like: that is a copy here, and the tensor would stay as it is. Write `tensor[index] = values`, "
                "or compute a full tensor and tensor.copy_() it; to change the copy itself, clone() it first"
            )
        if _is_partial(target):
            _finish(target)


def _lie_alike(func: Function, tensors: Sequence[torch.Tensor], args: tuple[Any, ...]) -> bool:
    """Return whether all tensors have the same shape and the same parts of it, or one element."""
    if func.__name__.startswith(("_foreach_", "_fused_")):
        columns = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor)]
        rows: Iterator[Any] = zip(*columns, strict=False)
        others = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return all(_row_lies_alike([*row, *others]) for row in rows)
    return _row_lies_alike(tensors)


def _asks_for_mean(func: Function, shards: Sequence[torch.Tensor]) -> bool:
    """Return whether the gradient of what a function returns will be the process's own: that of a single element.

    What comes of a shard with others is either a shard again, or is gathered. This may meet anything.
    """
    if not torch.is_grad_enabled() or func.__name__ in WITHOUT_GRADIENT:
        return False
    return any(shard.requires_grad and not shard.dim() for shard in shards)


def _row_lies_alike(tensors: Sequence[torch.Tensor]) -> bool:
    first: Any = next((tensor for tensor in tensors if is_of_model(tensor)), None)
    # A number beside what has a graph may be the process's own: then the gradients have to be averaged.
    has_graph = torch.is_grad_enabled() and any(is_of_model(each) and each.requires_grad for each in tensors)
    for tensor in tensors:
        if is_of_model(tensor):
            spec: Any = tensor._spec  # type: ignore[attr-defined]
            if _is_partial(tensor) or spec.placements != first._spec.placements or tensor.shape != first.shape:
                return False
        elif tensor.dim() or has_graph or _needs_graph(tensor) or tensor.device != first.device:
            return False
    return True


def _is_total_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a norm is of all elements of a tensor, of an order that parts can be put together for.

    Not of infinity: the largest of all parts would lose a NaN in gloo.
    """
    tensors = _tensors_in(args, kwargs)
    order = args[1] if len(args) == 2 else kwargs.get("ord", kwargs.get("p", 2))
    known = order in ("fro", 1, 2)
    simple = len(args) <= 2 and kwargs.keys() <= {"ord", "p"} and all(tensor.is_floating_point() for tensor in tensors)
    return known and simple and not any(_needs_graph(tensor) or _is_partial(tensor) for tensor in tensors)


def _needs_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _is_partial(tensor: Any) -> bool:
    return is_of_model(tensor) and any(isinstance(placement, Partial) for placement in tensor._spec.placements)


def _is_split(tensor: Any) -> bool:
    """Return whether this process has only a part of the tensor."""
    spec = tensor._spec
    return any(
        not isinstance(placement, Replicate) and spec.mesh.size(dim) > 1
        for dim, placement in enumerate(spec.placements)
    )


def _is_split_or_copy(tensor: Any) -> bool:
    return hasattr(tensor, _COPY) or _is_split(tensor)


def _has_no_empty_part(tensor: Any) -> bool:
    spec = tensor._spec
    for dim, placement in enumerate(spec.placements):
        if hasattr(placement, "dim"):  # also of shards of shards, over fsdp and tp
            count = spec.mesh.size(dim)
            if not chunk(tensor.shape[placement.dim], count, count - 1):
                return False
    return True


# Full tensors


def _call_as_is(func: Function, args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _full_tensors(tree: Any) -> Any:
    return tree_map(lambda leaf: full_tensor(leaf) if is_of_model(leaf) else leaf, tree)


def full_tensor(tensor: Any) -> torch.Tensor:
    """Return a distributed tensor's full tensor, an ordinary one, connected to it for autograd. Collective.

    Its gradient is the mean of what the processes give it, as that of a model's weights.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if _needs_graph(tensor):
            vars(tensor)[_USED] = True
            return _Unshard.apply(tensor)  # type: ignore[no-any-return]
        return _values(tensor)


def pop_used(parameter: torch.Tensor) -> bool:
    """Return whether a graph was made through a parameter since this was last asked."""
    return bool(vars(parameter).pop(_USED, False))


def _values(tensor: Any) -> torch.Tensor:
    if _is_partial(tensor) or _is_split(tensor):
        script_reads.expect_all(tensor._spec)
    if _is_partial(tensor):
        _finish(tensor)
    if not _is_split(tensor):
        return tensor._local_tensor.detach()  # type: ignore[no-any-return]
    # A copy, as a thread of gloo's keeps what it gathers for a moment longer: a tensor that nobody else has any more
    # would look as if somebody had it (`_check_targets()`).
    values: torch.Tensor = tensor.detach().clone().full_tensor()
    return values


def _finish(tensor: Any) -> None:
    """Add up the parts of a sum, in place."""
    placements = [Replicate() if isinstance(each, Partial) else each for each in tensor._spec.placements]
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        done = tensor.detach().redistribute(placements=placements)
    tensor._local_tensor, tensor._spec = done._local_tensor, done._spec


class _Unshard(torch.autograd.Function):
    """Gather a tensor; average its gradient over the processes, and cut it up."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> torch.Tensor:
        """Return the full tensor."""
        if _is_partial(tensor):
            _finish(tensor)
        ctx.spec = tensor._spec
        return _values(tensor).view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return this process's part of the gradients' mean."""
        if torch.is_grad_enabled() and gradient.requires_grad:
            raise EngineError(
                "create_graph=True through a sharded parameter that is used outside of its unit's forward: its "
                "gradient has no graph here. Use the parameter inside of the forward of the unit that it belongs to"
            )
        return DTensor(
            local_part(mean_over_data(gradient, ctx.spec), ctx.spec).contiguous(), ctx.spec, requires_grad=False
        )


def mean_over_data(tensor: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return the mean of an ordinary tensor over the processes that see different data. Collective."""
    mean = tensor.detach().contiguous().clone()
    for dim, name in enumerate(spec.mesh.mesh_dim_names):
        if name != Role.TENSOR.value and spec.mesh.size(dim) > 1:
            torch.distributed.all_reduce(mean, group=spec.mesh.get_group(dim))
            mean /= spec.mesh.size(dim)
    return mean


def gradient_over_data(spec: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a sharded parameter as the parameter lies. Collective where it is an ordinary tensor.

    So it is where an autograd.Function was called with the parameter itself: it is this process's own then.
    """
    if is_of_model(gradient):
        return gradient
    if torch.is_grad_enabled() and gradient.requires_grad:
        raise EngineError(
            "create_graph=True through an autograd.Function that was given a sharded parameter outside of its unit's "
            "forward, or one without dimensions: its gradient has no graph here. Use the parameter outside of the "
            "function"
        )
    return DTensor(local_part(mean_over_data(gradient, spec), spec).contiguous(), spec, requires_grad=False)


def local_part(values: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return this process's part of a full tensor, a view."""
    split = list(enumerate(spec.placements))
    if any(type(placement).__name__ == "_StridedShard" for placement in spec.placements):
        split.reverse()  # a weight that dist.tp splits, too, along the same dimension, is sharded within its part
    for dim, placement in split:
        if isinstance(placement, Replicate) or spec.mesh.size(dim) == 1:
            continue
        own = chunk(values.shape[placement.dim], spec.mesh.size(dim), spec.mesh.get_local_rank(dim))
        values = values.narrow(placement.dim, own.start, len(own))
    return values


def _write(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[torch.Tensor]) -> Any:
    """Call a function that writes, with full tensors, and put what it has written into the shards."""
    if all(map(script_reads.is_of_other_stage, filter(is_of_model, targets))):  # that one writes
        return None if func.__name__ in WRITING_DUNDERS else targets[0]
    full_tensors: dict[int, torch.Tensor] = {}
    for target in targets:
        if _needs_graph(target):
            if target.is_leaf:
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            raise EngineError(
                f"{func.__name__}() writes to a sharded tensor for which autograd keeps a graph: use the function that "
                "returns a new tensor, or torch.no_grad()"
            )
        if is_of_model(target):
            full_tensors[id(target)] = full_tensor(target).clone()

    def swapped(leaf: Any) -> Any:
        if id(leaf) in full_tensors:
            return full_tensors[id(leaf)]
        return full_tensor(leaf) if is_of_model(leaf) else leaf

    output = func(*tree_map(swapped, args), **tree_map(swapped, kwargs))
    by_full_tensor = {id(values): target for target in targets if (values := full_tensors.get(id(target))) is not None}
    with torch.no_grad():
        for target in targets:
            values = full_tensors.get(id(target))
            if values is None:
                continue
            if values.shape != target.shape or values.dtype != target.dtype:
                raise EngineError(f"{func.__name__}() would change the shape or the dtype of a sharded tensor")
            shard: Any = target
            shard._local_tensor.copy_(local_part(values, shard._spec))
            increment_version(target)
    return tree_map(lambda leaf: by_full_tensor.get(id(leaf), leaf), output)


def _as_copy(values: torch.Tensor, like: Any) -> Any:
    mesh = like._spec.mesh
    with torch._C.DisableTorchFunctionSubclass():
        copy: Any = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    memory = StorageWeakRef(like._local_tensor.untyped_storage())
    setattr(copy, _COPY, (*getattr(like, _COPY, ()), memory))
    return copy


def _with_mark_of(args: tuple[Any, ...], output: Any) -> Any:
    """Mark what shares memory with a copy as one."""
    given: Any = args[0] if args else None
    if not isinstance(output, DTensor) or output is given or not hasattr(given, _COPY):
        return output
    made: Any = output
    if made._local_tensor.untyped_storage()._cdata == given._local_tensor.untyped_storage()._cdata:
        setattr(made, _COPY, getattr(given, _COPY))
    return made


def _draw(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], like: Any) -> Any:
    """Call a function that draws random numbers, for all of a tensor: processes with one seed then have one tensor.

    Each would otherwise draw the same numbers for its own part, and generators would go apart where parts are uneven.
    """
    spec = like._spec
    in_place = _targets(func, args, kwargs)
    if in_place and _needs_graph(like):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    empty = torch.empty(script_reads.full_shape(like), dtype=like.dtype, device=like.device)
    given, named = tree_map(lambda leaf: empty if leaf is like else leaf, (args, kwargs))
    drawn = func(*given, **named)  # also for another stage, so that generators stay alike
    part = drawn.new_empty(like.shape) if script_reads.is_of_other_stage(like) else local_part(drawn, spec)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if not in_place:
            made = part.clone().requires_grad_(part.requires_grad)
            return _same_on_copies(
                DTensor.from_local(
                    made, spec.mesh, spec.placements, run_check=False, shape=like.shape, stride=like.stride()
                )
            )
        like._local_tensor.copy_(part)
        increment_version(like)
        return _same_on_copies(like)


def _same_on_copies(output: Any) -> Any:
    """Copy random numbers from the first of the processes that hold the same part of a tensor to the others."""
    for tensor in filter(is_of_model, _tensors_in((output,), {})):
        shard: Any = tensor
        spec = shard._spec
        for dim, placement in enumerate(spec.placements):
            if isinstance(placement, Replicate) and spec.mesh.size(dim) > 1:
                local = shard._local_tensor.detach()
                torch.distributed.broadcast(local, group=spec.mesh.get_group(dim), group_src=0)
    return output


# Beside arithmetic


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return what `copy.deepcopy()` gives: without what the model has noted on its parameter."""
    if id(tensor) not in memo:
        if not tensor.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        own = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = torch.nn.Parameter(own) if is_parameter else own
        memo[id(tensor)].requires_grad_(tensor.requires_grad)
    copied: torch.Tensor = memo[id(tensor)]
    return copied


def _call_of_parameter(kind: FunctionKind, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameter: Any = args[0]
    owner: FSDPGroups | None = vars(parameter).get(OWNER)
    if kind is FunctionKind.HOOK:
        if owner is not None or script_reads.is_of_other_stage(parameter):
            raise EngineError(
                "register_hook() on a sharded parameter: autograd sees the full weight only, so that the hook would "
                "never run. Use parameter.register_post_accumulate_grad_hook(), which sees parameter.grad; of a model "
                "in stages (config.dist.pp.size), read parameter.grad after loss.backward()"
            )
        return _call_as_is(func, args, kwargs)
    if kind is FunctionKind.GET_DATA:
        if owner is not None:
            owner.on_data(parameter)
        return _with_mark_of(args, _call_as_is(func, args, kwargs))
    value = args[1]
    if kind is FunctionKind.SET_GRADIENT:
        if owner is not None:
            owner.on_set_gradient(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            if is_of_model(parameter) and isinstance(value, torch.Tensor):
                args = (parameter, _like(parameter, value, "grad"))
            return func(*args, **kwargs)
    if not is_of_model(parameter):
        return func(parameter, full_tensor(value))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        parameter._local_tensor = _like(parameter, value, "data")._local_tensor.clone()
    if owner is not None:
        owner.on_rebound(parameter)
    return None


def _like(parameter: Any, value: torch.Tensor, what: str) -> Any:
    """Return a value as a tensor that is sharded like a parameter."""
    if tuple(value.shape) != tuple(parameter.shape) or value.dtype != parameter.dtype:
        raise EngineError(
            f"parameter.{what} = a tensor of shape {tuple(value.shape)} in {value.dtype}: the sharded parameter has "
            f"the shape {tuple(parameter.shape)} in {parameter.dtype}, and keeps it"
        )
    if is_of_model(value) and value._spec.placements == parameter._spec.placements:  # type: ignore[attr-defined]
        return value
    values = full_tensor(value) if is_of_model(value) else value
    return DTensor(local_part(values.detach(), parameter._spec).clone(), parameter._spec, requires_grad=False)
