"""Split a model's layers between processes by the plan, with PyTorch's distributed tensors.

A layer that is split has a distributed tensor as its weight, and computes with it; what goes in and comes out are
ordinary tensors. All other parameters are distributed tensors too, replicated on each process, so that an optimizer or
a norm meets one kind; their modules see the ordinary tensor inside.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchacc.engines.held_parameters import Slot, find_slots
from torchacc.errors import ConfigError
from torchacc.parallel.axes import ParameterSpec, Role, dim_over
from torchacc.parallel.plan import PlannedParameter, ShardingPlan
from torchacc.parallel.tensor_parallel import TensorParallelPlan

Forward = Callable[..., Any]

_FAMILIES = ("bert", "llama", "mistral", "qwen2", "t5")
"""Those whose modules, given a part of the heads, compute with that part."""
_HEAD_COUNT = "n_heads"
"""The attribute by which T5's attention counts its heads."""
_LOGITS = re.compile(r"(^|\.)(lm_head|predictions\.decoder)$")
"""Projections whose output is put together, as the loss needs all of it."""
_KEYS_OR_VALUES = re.compile(r"\.[kv]_proj\.")


def check(model: nn.Module, plan: ShardingPlan) -> None:
    """Refuse models and plans that would not compute the unsharded numbers.

    Args:
        model: The model; it is only read.
        plan: Its plan.

    Raises:
        ConfigError: The plan is not that of a family that is known to compute right, or asks for more.
    """
    tp, instead = plan.tensor_parallel, "use config.backend = 'xla' with config.dist.fsdp.use_spmd = True"
    if tp.source not in _FAMILIES:
        raise ConfigError(
            f"config.dist.tp.size = {tp.size} by the plan of {tp.source}: the native engine splits the layers of "
            f"{', '.join(_FAMILIES)} only, whose modules compute with the part of the heads that they are given; "
            f"{instead}"
        )
    number = next((name for name, parameter in model.named_parameters() if not parameter.dim()), None)
    if number is not None:
        raise ConfigError(
            f"config.dist.tp.size = {tp.size}, and the parameter {number!r} has no dimension, which the native "
            f"engine keeps on every device only where layers are not split: give it the shape (1,), or {instead}"
        )
    adapter = next((type(m).__name__ for m in model.modules() if type(m).__module__.startswith("peft.")), None)
    if adapter is not None:
        raise ConfigError(
            f"config.dist.tp.size = {tp.size} with an adapter of peft ({adapter}): the native engine splits the "
            "layers of the family itself, and would leave those that have an adapter unsplit. Put these devices on "
            "config.dist.fsdp.size, or split the merged model, model.merge_and_unload()"
        )
    if tp.sequence_parallel:
        raise ConfigError(f"config.dist.tp.sequence_parallel = True is not available in the native engine: {instead}")
    for name, reason in tp.unsplit.items():
        if _KEYS_OR_VALUES.search(name):
            raise ConfigError(
                f"config.dist.tp.size = {tp.size}, and {reason}: the native engine splits keys and values as "
                f"queries. Choose a size that divides, or {instead}"
            )


def split_forwards(model: nn.Module, plan: ShardingPlan, mesh: Any, compiled: Iterable[str] = ()) -> None:
    """Let layers compute with distributed tensors as their weights, and all others with the ordinary tensors inside.

    Args:
        model: The model.
        plan: Says which parameters will be split.
        mesh: The DeviceMesh of the axis `tp`.
        compiled: Modules that torch.compile compiles already: they are given ordinary tensors before they run, as it
            takes tensors that come and go inside for other graphs.
    """
    specs = _specs_by_module(model, plan)
    for name, module in model.named_modules():
        if _split_dim(specs.get(module, {})) is not None:
            _split(module, name, _split_dim(specs[module]), mesh)
        if hasattr(module, _HEAD_COUNT) and any(
            _split_dim(specs.get(child, {})) is not None for child in module.children()
        ):
            setattr(module, _HEAD_COUNT, getattr(module, _HEAD_COUNT) // plan.tensor_parallel.size)
    inside_of = {part: model.get_submodule(name) for name in compiled for part in model.get_submodule(name).modules()}
    ordinary: dict[nn.Module, list[Slot]] = {}
    for module, of_module in specs.items():
        if _split_dim(of_module) is None:
            ordinary.setdefault(inside_of.get(module, module), []).extend((module, leaf) for leaf in of_module)
    for module, slots in ordinary.items():
        _wrap(module, _with_ordinary_tensors, slots)


def _split(module: nn.Module, name: str, dim: int | None, mesh: Any) -> None:
    """Let a layer whose weight is split over a dimension compute with its part."""
    if isinstance(module, nn.Embedding) and dim == 0:
        _wrap(module, _look_up_part, module, mesh)
        return
    assert isinstance(module, nn.Linear | nn.Embedding), f"{name} is a {type(module).__name__}"
    by_input, gives_logits = isinstance(module, nn.Linear) and dim == 1, _LOGITS.search(name) is not None
    before, after = _hooks(mesh, takes_part=by_input, gives_part=not (by_input or gives_logits))
    if gives_logits:  # in its forward, which compute.chunked_loss calls by itself
        _wrap(module, _multiply_part, before, after)
    else:
        # One function for all layers of a kind, as torch.compile takes another function for another graph.
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def _wrap(module: Any, run: Callable[..., Any], *args: Any) -> None:
    """Let a function run in the place of a module's forward: it is called with that, `args`, and what that is given."""
    forward = module.forward
    module.forward = functools.wraps(forward)(functools.partial(run, forward, *args))


def _specs_by_module(model: nn.Module, plan: ShardingPlan) -> dict[nn.Module, dict[str, ParameterSpec]]:
    specs: dict[nn.Module, dict[str, ParameterSpec]] = {}
    for planned in plan.parameters:
        for owner, leaf in find_slots(model, planned.names):
            specs.setdefault(owner, {})[leaf] = plan.tensor_parallel.spec_of(planned.name)
    return specs


def _split_dim(specs: Mapping[str, ParameterSpec]) -> int | None:
    """Return the dimension over which a module's weight is split."""
    return dim_over(specs.get("weight", ()), Role.TENSOR)


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
        for owner, leaf in find_slots(model, planned.names):
            owner._parameters[leaf] = new


def _with_ordinary_tensors(forward: Forward, slots: Sequence[Slot], *args: Any, **kwargs: Any) -> Any:
    """Run a forward with ordinary tensors in the place of parameters that are replicated on each process."""
    from torch.distributed.tensor import Replicate

    for owner, name in slots:
        replicated: Any = owner._parameters[name]
        # Each process has all of the gradient: what split layers send back was added up over the processes.
        owner.__dict__[name] = replicated.to_local(grad_placements=[Replicate()])
    try:
        return forward(*args, **kwargs)
    finally:
        for owner, name in slots:
            owner.__dict__.pop(name, None)


def _multiply_part(forward: Forward, before: Forward, after: Forward, given: torch.Tensor) -> Any:
    """Run the forward of a layer whose weight is split between the functions that are hooks elsewhere."""
    return after(None, None, forward(before(None, (given,))))


@functools.cache
def _hooks(mesh: Any, *, takes_part: bool, gives_part: bool) -> tuple[Any, Any]:
    """Return the hooks before and after a layer whose weight is split, which multiplies distributed tensors.

    Args:
        mesh: Of the processes that share it.
        takes_part: Whether its input is split over its last dimension.
        gives_part: Whether its output is to be.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    takes, gives = [Shard(-1) if takes_part else Replicate()], [Shard(-1) if gives_part else Replicate()]

    def before(module: nn.Module, args: tuple[torch.Tensor]) -> DTensor:
        return DTensor.from_local(args[0], mesh, takes, run_check=False)

    def after(module: nn.Module, args: Any, output: DTensor) -> torch.Tensor:
        local: torch.Tensor = output.redistribute(placements=gives).to_local()
        return local

    return before, after


def _look_up_part(forward: Forward, module: nn.Embedding, mesh: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run an embedding whose rows are split: each process looks its rows up, and the results are summed.

    PyTorch's distributed embedding fails where there is a `padding_idx`.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    weight: Any = module._parameters["weight"]
    part = weight.to_local(grad_placements=[Shard(0)])
    first, padding = mesh.get_local_rank() * len(part), module.padding_idx
    own = (ids >= first) & (ids < first + len(part))
    has_padding = padding is not None and first <= padding < first + len(part)
    module.__dict__["weight"] = part
    module.padding_idx = padding - first if padding is not None and has_padding else None
    try:
        found = forward(torch.where(own, ids - first, 0))
    finally:
        module.__dict__.pop("weight")
        module.padding_idx = padding
    summand = DTensor.from_local(found.masked_fill(~own[..., None], 0), mesh, [Partial()], run_check=False)
    local: torch.Tensor = summand.redistribute(placements=[Replicate()]).to_local()
    return local


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
