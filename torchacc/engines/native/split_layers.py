"""Split a model's layers between processes by the plan: each computes with its parts, which are ordinary tensors.

All parameters are PyTorch's distributed tensors at rest, those of no split layer replicated on each process, so that an
optimizer or a norm meets one kind. Their modules see the ordinary tensor inside. Communication happens before and after
each split layer, by PyTorch's own redistribution of distributed tensors, backward as forward.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from torchacc.engines.native.compiled_units import regions
from torchacc.errors import EngineError
from torchacc.parallel.axes import ParameterSpec, Role, dim_over
from torchacc.parallel.plan import PlannedParameter, ShardingPlan
from torchacc.parallel.tensor_parallel import (
    BASE_LAYER,
    OWN_PLAN,
    SHARED_HEADS,
    SUMMED_GRADIENT,
    TensorParallelPlan,
)

Forward = Callable[..., Any]

_HEAD_WIDTHS = ("n_heads", "split_size")
"""The attributes by which the attention of T5 and of GPT-2 counts its heads, or their columns."""


def split_forwards(model: nn.Module, plan: ShardingPlan, mesh: Any, *, is_compiled: bool) -> None:
    """Install hooks by which layers compute with their parts as ordinary tensors, and exchange what others need.

    Args:
        model: The model.
        plan: Says which parameters will be split.
        mesh: The DeviceMesh of the axis `tp`.
        is_compiled: Whether torch.compile compiles the model's units, which recompiles when the tensors of
            a module are replaced.
    """
    planned = {owner: each for each in plan.parameters for owner in each.owners(model)}
    tp = plan.tensor_parallel
    styles = {
        module: _style(module, tp.spec_of(each.name), tp.styles.get(each.name, ""))
        for (module, leaf), each in planned.items()
        if leaf == "weight"
    }
    names = {module: name for name, module in model.named_modules()}
    for module, style in styles.items():
        beside = names[module].partition(".lora_")[0]  # of an adapter the layer that it adds to
        layer = model.get_submodule(f"{beside}{BASE_LAYER}") if beside != names[module] else module
        _let_compute_with_part(module, style, layer, model.get_submodule(names[module].rpartition(".")[0]), mesh)
    _split_head_counts(model, styles, tp)
    # A part may read another's weight, so that all of a unit, or of the model outside of units, find ordinary tensors
    # before it runs. A part of the latter may run by itself, too, such as the encoder for generate().
    gathered = {*(unit.name for unit in plan.units), *plan.recomputed} - {""}
    outer_first = regions(plan) if is_compiled else sorted(gathered, key=len)
    inside_of = {part: outer for outer in map(model.get_submodule, outer_first) for part in outer.modules()}
    ordinary: dict[nn.Module, list[_OrdinaryTensor]] = {}
    for (module, leaf), each in planned.items():
        style = styles.get(module, "")
        how = _seen_as(leaf, style, tp.spec_of(each.name), tp.styles.get(each.name, ""))
        # Hide split weights from code that no test covers.
        is_hidden = bool(style) and tp.declared_by == OWN_PLAN and not is_compiled
        outer = module if is_hidden else inside_of.get(module, model)
        for at in {outer, module} if outer is model else {outer}:
            ordinary.setdefault(at, []).append(_OrdinaryTensor(module, leaf, how))
    for module, slots in ordinary.items():
        _wrap(module, _with_ordinary_tensors, slots, mesh, tp.num_key_value_heads)
        if any(slot.module is module for slot in slots):
            _hiding_parts.add(module)


def _split_head_counts(model: nn.Module, styles: Mapping[nn.Module, str], tp: TensorParallelPlan) -> None:
    """Set the number of heads of attention modules to that of this device's part.

    Args:
        model: The model.
        styles: How each module computes with its part.
        tp: Its plan.
    """
    for module in model.modules():
        for name in _HEAD_WIDTHS:
            if hasattr(module, name) and any(styles.get(child) in _GIVING_PARTS for child in _layers_in(module)):
                setattr(module, name, getattr(module, name) // tp.size)
        counts_heads = hasattr(module, "num_key_value_groups")  # not what holds a layer and its adapter
        if counts_heads and any(styles.get(child) == SHARED_HEADS for child in _layers_in(module)):
            attention: Any = module
            attention.num_key_value_groups = attention.num_key_value_groups * tp.num_key_value_heads // tp.size


def _layers_in(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module; in the place of one with an adapter the layer beside that."""
    return [getattr(child, "base_layer", child) for child in module.children()]


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is GPT-2's layer, whose weight is (input, output)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _computes_by_itself(module: nn.Module) -> bool:
    """Return whether a layer is sure to be what its class says: that of an attention may be read by that alone."""
    if isinstance(module, nn.Embedding):  # these look at which rows are looked up
        return type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq
    return type(module) is nn.Linear or _is_conv1d(module)


def _style(module: nn.Module, spec: ParameterSpec, declared: str) -> str:
    """Return how a module computes with its part of a weight; empty where it has all of it.

    Without a word from the plan each layer puts its output together, which is right whatever comes next.
    """
    dim = dim_over(spec, Role.TENSOR)
    if dim is None:
        return declared
    if not declared and not _computes_by_itself(module):
        return ""
    if isinstance(module, nn.Embedding):
        return "embedding_rowwise" if dim == 0 else "" if declared == "colwise" else "embedding_colwise"
    if not isinstance(module, nn.Linear) and not _is_conv1d(module):
        return ""
    by_output = dim == (1 if _is_conv1d(module) else 0)
    is_for_layer = declared and not declared.startswith("embedding")  # of a head that is tied to an embedding
    return declared if is_for_layer else "colwise_gather_output" if by_output else "rowwise_split_input"


def _let_compute_with_part(module: Any, style: str, layer: Any, parent: Any, mesh: Any) -> None:
    """Put before and after a module what its style sends.

    Args:
        module: The module.
        style: Its style.
        layer: That to whose output it adds, or the module itself.
        parent: The module that it is in.
        mesh: The DeviceMesh of the axis `tp`.
    """
    if style == "embedding_rowwise":
        _wrap(module, _look_up_part, module, mesh)
        return
    if _is_conv1d(module) and "colwise" in style:
        module.nf //= mesh.size()
    width = parent.qk_rope_head_dim if style == "mla_kv_a_proj" else 0
    parts = layer.nf * mesh.size() // layer.nx if _is_conv1d(layer) else 2
    before, after = _hooks(mesh, style, parts if style == "packed_colwise" else width)
    if style == "colwise_gather_output":  # in its forward, which compute.chunked_loss calls by itself
        _wrap(module, _multiply_part, module, before, after)
        return
    # One function for all layers of a kind, as torch.compile takes another function for another graph.
    if before is not None:
        module.register_forward_pre_hook(before)
    if after is not None:
        module.register_forward_hook(after)


def _wrap(module: Any, run: Callable[..., Any], *args: Any) -> None:
    """Replace a module's forward by a function, which is called with that forward, `args`, and its inputs."""
    forward = module.forward
    module.forward = functools.wraps(forward)(functools.partial(run, forward, *args))


_COPY = ("full", "full", "summand")
"""Each process goes on with a copy: backward sums what they send back."""
_CUT = ("full", "part", "")
_JOIN = ("part", "full", "")
_SUM = ("summand", "full", "")

_MOVES: Mapping[str, tuple[tuple[str, str, str] | None, tuple[str, str, str] | None]] = {
    "colwise": (_COPY, None),
    SHARED_HEADS: (_COPY, None),
    "packed_colwise": (_COPY, ("part", "full", "summand")),
    "colwise_gather_output": (_COPY, _JOIN),
    "rowwise": (None, _SUM),
    "rowwise_split_input": (_CUT, _SUM),
    "embedding_colwise": (None, _JOIN),
}
"""How a layer computes with its part -> what is done to its input, and to its output, as `_relaid()` takes it."""
_GIVING_PARTS = ("colwise", "packed_colwise")


def _relaid(tensor: torch.Tensor, mesh: Any, has: str, wants: str, sends_back: str = "") -> torch.Tensor:
    """Return a tensor as the processes go on with it.

    Args:
        tensor: What this process has.
        mesh: The DeviceMesh of the axis `tp`.
        has: Whether that is the `full` tensor, a `part` of its last dimension, or a `summand` of it.
        wants: The same of what comes out.
        sends_back: The same of the gradient of what comes out, where it is something else.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not isinstance(mesh, DeviceMesh):  # the memory plan's, which has no processes
        planned: torch.Tensor = mesh.relaid(tensor, has, wants, sends_back)
        return planned

    placements: dict[str, Any] = {"full": [Replicate()], "part": [Shard(-1)], "summand": [Partial()], "": None}
    with _redistributing():
        there = DTensor.from_local(tensor, mesh, placements[has], run_check=False)
        local: torch.Tensor = there.redistribute(placements=placements[wants]).to_local(
            grad_placements=placements[sends_back]
        )
    return local


def _redistributing() -> AbstractContextManager[None]:
    """Return a context for PyTorch's redistribution, which raises in inference mode, where it detaches in place."""
    from torchacc.engines.native.fsdp_group import no_inference_mode

    return nullcontext() if torch.compiler.is_compiling() else no_inference_mode()


@functools.cache
def _hooks(mesh: Any, style: str, number: int) -> tuple[Any, Any]:
    """Return the hooks before and after a layer; None where nothing is to do.

    Args:
        mesh: Of the processes that share it.
        style: How it computes with its part.
        number: Of the layers that are fused into one, or of the columns of an output that go past the next layer.
    """
    given, returned = _MOVES.get(style, (None, None))

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        _check_computes_with_part(module)
        return (_relaid(args[0], mesh, *given), *args[1:])  # type: ignore[misc]

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        _check_computes_with_part(module)
        return _relaid(output, mesh, *returned)  # type: ignore[misc]

    def after_fused(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Return this process's part of each of the fused layers: what it has computed is a part of them in a row."""
        fused = after(module, args, output).unflatten(-1, (number, mesh.size(), -1))
        own: torch.Tensor = fused[..., mesh.get_local_rank(), :].flatten(-2)
        return own

    def after_latent(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Sum the gradients of all heads in the columns of keys that they share; the rest get them later."""
        shared = _relaid(output[..., -number:], mesh, *_COPY)
        return torch.cat([output[..., :-number], shared], -1)

    special = {"packed_colwise": after_fused, "mla_kv_a_proj": after_latent}.get(style)
    return before if given is not None else None, special or (after if returned is not None else None)


_hiding_parts: WeakSet[nn.Module] = WeakSet()
"""Modules that find their part in their own forward, which hooks do not see."""


def _check_computes_with_part(module: Any) -> None:
    """Refuse a layer whose weight is the distributed tensor at rest, of which it has computed with all.

    Raises:
        EngineError: It is.
    """
    from torch.distributed.tensor import DTensor

    if not torch.compiler.is_compiling() and isinstance(module.weight, DTensor) and module not in _hiding_parts:
        raise EngineError(
            f"a {type(module).__name__} that dist.tp splits was called by itself, and what it computes is a part for "
            "the layers around it: call the whole model, or one of its layers as a whole; for the weight, "
            "torchacc.full_state_dict(model) on every process"
        )


class _OrdinaryTensor(NamedTuple):
    """What a module sees of one of its parameters."""

    module: nn.Module
    name: str
    seen_as: str
    """As what it computes with that: see `_ordinary()`."""


def _seen_as(leaf: str, style: str, spec: ParameterSpec, declared: str) -> str:
    """Return what a module sees of a parameter, by how it computes and by what the plan says of that."""
    is_split = dim_over(spec, Role.TENSOR) is not None
    if declared == SUMMED_GRADIENT:
        return "copy"
    if declared == SHARED_HEADS:
        return declared
    if leaf == "bias" and style.startswith("rowwise"):
        return "share"
    if leaf == "bias" and "colwise" in style and not is_split:
        return "cut"
    is_of_layer = leaf in ("weight", "bias") and bool(style)
    return "own" if not is_split or is_of_layer or declared == "colwise" else "all"


def _with_ordinary_tensors(
    forward: Forward, slots: Sequence[_OrdinaryTensor], mesh: Any, num_heads: int, *args: Any, **kwargs: Any
) -> Any:
    """Run a forward with ordinary tensors in the place of parameters, or of what stands in for these by now."""
    before = [vars(module).get(name) for module, name, _ in slots]
    try:
        for (module, name, seen_as), stand_in in zip(slots, before, strict=True):
            found: Any = module._parameters[name] if stand_in is None else stand_in
            if hasattr(found, "placements"):  # else it is ordinary, as for the module around this one
                vars(module)[name] = _ordinary(_unsharded(found, mesh), seen_as, mesh, num_heads)
        return forward(*args, **kwargs)
    finally:
        for (module, name, _), stand_in in zip(slots, before, strict=True):
            if stand_in is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = stand_in


def _unsharded(parameter: Any, mesh: Any) -> Any:
    """Return a distributed tensor of the processes that share layers, also of a parameter that is sharded at rest.

    So is that of a module outside of units which a script calls by itself.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from torchacc.engines.native.shard_arithmetic import full_tensor

    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == mesh.size():  # those of plans are none
        return parameter
    names = parameter.device_mesh.mesh_dim_names or ()
    own: Any = dict(zip(names, parameter.placements, strict=True))[Role.TENSOR.value]
    with _redistributing():
        full = DTensor.from_local(full_tensor(parameter), mesh, [Replicate()], run_check=False)
        return full.redistribute(placements=[own if own.is_replicate() else Shard(own.dim)])


def _ordinary(parameter: Any, seen_as: str, mesh: Any, num_heads: int) -> torch.Tensor:
    """Return a parameter as a module computes with it.

    Args:
        parameter: The distributed tensor, unsharded over all axes but `tp`.
        seen_as: `own`: what this process has. `copy`: all, of which each process uses something else. `cut`: a part of
            what all have. `share`: a summand. `all`: put together. `shared_heads`: the rows of one head.
        mesh: The DeviceMesh of the axis `tp`.
        num_heads: The number of heads that are shared.
    """
    from torch.distributed.tensor import Replicate

    if seen_as in ("all", "share"):
        with _redistributing():
            parameter = parameter.redistribute(placements=[Replicate()])
    # Of a full tensor each process has all of the gradient: what split layers send back was added up over them.
    own: torch.Tensor = parameter.to_local(grad_placements=parameter.placements)
    if seen_as == "share":
        share: torch.Tensor = _Share.apply(own, mesh.size())
        return share
    if seen_as == SHARED_HEADS:
        of_heads = _relaid(own, mesh, *_COPY).unflatten(0, (num_heads, -1))
        one: torch.Tensor = of_heads[mesh.get_local_rank() * num_heads // mesh.size()]
        return one
    moves = {"copy": _COPY, "cut": _CUT}
    return _relaid(own, mesh, *moves[seen_as]) if seen_as in moves else own


class _Share(torch.autograd.Function):
    """A bias that each of several processes adds to its summand of an output: together they add it once."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, num_processes: int) -> torch.Tensor:
        return bias / num_processes

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _multiply_part(forward: Forward, module: nn.Module, before: Forward, after: Forward, given: torch.Tensor) -> Any:
    """Run the forward of a layer whose weight is split between the functions that are hooks elsewhere."""
    return after(module, None, forward(*before(module, (given,))))


def _look_up_part(forward: Forward, module: nn.Embedding, mesh: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run an embedding whose rows are split: each process looks its rows up, and the results are summed."""
    _check_computes_with_part(module)
    first, padding = mesh.get_local_rank() * len(module.weight), module.padding_idx
    own = (ids >= first) & (ids < first + len(module.weight))
    # What no process has goes to the lookup as it is, which refuses it, as that of the unsplit layer does.
    others = ~own & (ids >= 0) & (ids < len(module.weight) * mesh.size())
    has_padding = padding is not None and first <= padding < first + len(module.weight)
    module.padding_idx = padding - first if padding is not None and has_padding else None
    try:
        found = forward(torch.where(others, 0, ids - first))
    finally:
        module.padding_idx = padding
    return _relaid(found.masked_fill(~own[..., None], 0), mesh, *_SUM)


def distribute(model: nn.Module, parameters: Iterable[PlannedParameter], plan: TensorParallelPlan, mesh: Any) -> None:
    """Replace full parameters by distributed tensors on the device, in place.

    Args:
        model: The model, the same on each process.
        parameters: What to replace.
        plan: Says over which dimension each is split.
        mesh: The DeviceMesh of the axis `tp`.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for planned in parameters:
        old, spec = model.get_parameter(planned.name), plan.spec_of(planned.name)
        dim = dim_over(spec, Role.TENSOR)
        placement = Replicate() if dim is None else Shard(dim)
        full = old.detach().contiguous()
        part = distribute_tensor(full, mesh, [placement], src_data_rank=None)  # None: each process cuts its own
        new = nn.Parameter(part, requires_grad=old.requires_grad)
        for owner, leaf in planned.owners(model):
            owner._parameters[leaf] = new


def agree_on_random_numbers(device: torch.device, mesh: Any) -> None:
    """Seed the processes that share layers alike, as their activations are the same. Collective."""
    import torch.distributed as dist

    state = torch.get_rng_state()
    dist.broadcast(state, group=mesh.get_group(), group_src=0)
    torch.set_rng_state(state)
    if device.type != "cpu":
        generator = torch.get_device_module(device)
        state = generator.get_rng_state()
        dist.broadcast(state, group=mesh.get_group(), group_src=0)
        generator.set_rng_state(state)
