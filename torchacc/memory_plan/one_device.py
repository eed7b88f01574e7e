"""What one device runs of a model that several share: its parts of layers, tokens, experts or stage, without values.

Layers, attention and stages are split by the native engine's own code. What it sends to other devices is a tensor of
the same size here, and is noted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torchacc.engines.native import split_layers, split_sequence
from torchacc.engines.native.ring_attention import Ring, attend_in_ring
from torchacc.engines.native.split_stages import StageModules
from torchacc.engines.patches import sequence_attention
from torchacc.engines.patches.sequence_attention import AttentionGroups, SplitForward
from torchacc.errors import ConfigError
from torchacc.parallel.axes import Role, axis_with
from torchacc.parallel.experts import Experts
from torchacc.parallel.plan import ShardingPlan
from torchacc.parallel.sequence_split import SequenceSplit, head_parts, next_labels
from torchacc.parallel.sharding import local_shard

_NO_RANK = -1
"""In the name of an implementation of attention that no process runs."""


@dataclass(frozen=True)
class Sent:
    """What a device sends in one exchange of a microbatch."""

    role: Role
    """Along which axis."""
    nbytes: int
    """That leave the device, by the algorithm that sends the fewest."""


class Traffic:
    """Notes what is sent while a step is recorded."""

    def __init__(self) -> None:
        self.found: list[Sent] = []

    def note(self, role: Role, nbytes: int) -> None:
        """Record one exchange."""
        self.found.append(Sent(role, nbytes))


def on_one_device(model: nn.Module, plan: ShardingPlan, stage: int, traffic: Traffic) -> nn.Module:
    """Change a model on the meta device into what one device runs of it.

    Args:
        model: The model, which is changed in place.
        plan: Its plan, on a mesh of the axes along which devices compute other parts of one step.
        stage: Which of the stages the device computes.
        traffic: Notes what is sent.
    """
    dtype = getattr(torch, plan.compute_dtype)
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
    if plan.mesh.size(Role.TENSOR) > 1:
        _split_layers(model, plan, traffic)
    for experts in plan.experts:
        _spread_experts(model.get_submodule(experts.module), experts, plan.mesh.size(Role.TENSOR), traffic)
    if plan.mesh.size(Role.SEQUENCE) > 1:
        _split_samples(model, plan, traffic)
    if plan.mesh.size(Role.PIPELINE) > 1:
        _run_stage(model, plan, stage, dtype, traffic)
    return model


# Layers


class _LayersWithoutProcesses:
    """Stands for the DeviceMesh of the devices that share layers."""

    def __init__(self, size: int, traffic: Traffic) -> None:
        self._size = size
        self._traffic = traffic

    def size(self) -> int:
        """Return the number of devices."""
        return self._size

    def get_local_rank(self) -> int:
        """Return which of them it is."""
        return 0

    def relaid(self, tensor: torch.Tensor, has: str, wants: str, sends_back: str) -> torch.Tensor:
        """Return a tensor of the size that `split_layers` would go on with."""
        moved: torch.Tensor = _Redistribution.apply(tensor, self, has, wants, sends_back or wants)
        return moved

    def move(self, tensor: torch.Tensor, has: str, wants: str) -> torch.Tensor:
        """Return a tensor of the size that comes out of an exchange, and note it."""
        share = tensor.nbytes * (self._size - 1) // self._size
        match has, wants:
            case "summand", "full":
                self._traffic.note(Role.TENSOR, 2 * share)
                return tensor.clone()
            case "part", "full":
                self._traffic.note(Role.TENSOR, tensor.nbytes * (self._size - 1))
                return torch.cat(torch.stack([tensor] * self._size).unbind(), -1)
            case "summand", "part":
                self._traffic.note(Role.TENSOR, share)
                return tensor.chunk(self._size, -1)[0].clone()
            case "full", "part":
                return tensor.chunk(self._size, -1)[0].clone()
        return tensor.view_as(tensor)


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: Any, has: str, wants: str, sends_back: str) -> torch.Tensor:
        ctx.how = mesh, sends_back, "full" if has == "summand" else has
        moved: torch.Tensor = mesh.move(tensor, has, wants)
        return moved

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        mesh, has, wants = ctx.how
        return mesh.move(gradient, has, wants), None, None, None, None


class _ReplicatedParameter:
    """Stands for a parameter that all devices have, as distributed tensors are asked for it."""

    placements = ()

    def __init__(self, full: torch.Tensor) -> None:
        self._full = full

    def to_local(self, grad_placements: object) -> torch.Tensor:
        """Return the full parameter."""
        return self._full


def _split_layers(model: nn.Module, plan: ShardingPlan, traffic: Traffic) -> None:
    mesh = _LayersWithoutProcesses(plan.mesh.size(Role.TENSOR), traffic)
    split_layers.split_forwards(model, plan, mesh, is_compiled=False)
    for planned in plan.parameters:
        spec = plan.tensor_parallel.spec_of(planned.name)
        within = local_shard(planned.name, planned.shape, plan.mesh, 0, spec).within
        old = model.get_parameter(planned.name)
        shape = planned.shape if within is None else within.part_shape(planned.shape)
        part: Any = nn.Parameter(torch.empty(shape, dtype=old.dtype, device=old.device), old.requires_grad)
        part.placements = ()
        part.to_local = partial(_given, part)
        if within is not None:
            part.redistribute = partial(_put_together, part, mesh, within.dim)
        else:
            part.redistribute = partial(_given, part)
        for owner, leaf in planned.owners(model):
            owner._parameters[leaf] = part


def _given(parameter: torch.Tensor, **_: object) -> torch.Tensor:
    return parameter


def _put_together(part: torch.Tensor, mesh: _LayersWithoutProcesses, dim: int, **_: object) -> _ReplicatedParameter:
    joined = mesh.relaid(part.movedim(dim, -1), "part", "full", "")
    return _ReplicatedParameter(joined.movedim(-1, dim))


# Samples


def _split_samples(model: Any, plan: ShardingPlan, traffic: Traffic) -> None:
    """Replace a model's forward: it takes whole samples, and computes the first part of each, as `split_sequence`."""
    heads, size = model.config.num_attention_heads, plan.mesh.size(Role.SEQUENCE)
    num_parts = head_parts([heads], size, plan.mesh.size(Role.TENSOR), plan.ring_size)
    ring = Ring(size // num_parts, 0, partial(_pass_on, traffic))
    groups = AttentionGroups(
        ranks=[_NO_RANK] * size,
        num_parts=num_parts,
        num_groups=ring.size,
        group=0,
        all_to_all=partial(_exchange, num_parts, traffic),
        all_gather=partial(_refuse_to_gather, size, ring.size),
        attend_in_ring=partial(attend_in_ring, ring),
    )
    name = sequence_attention.register(groups)
    sequence_attention.make_masks_of_all_tokens(model)
    split_sequence.choose_attention(model, name)
    forward, loss = model.forward, model.loss_function

    def loss_of_part(logits: Any, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        counted = {"num_items_in_batch": labels.sum(), "shift_labels": labels}
        part: torch.Tensor = loss(logits, labels, *args, **{**kwargs, **counted})
        return part

    def run(input_ids: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
        split = SequenceSplit(input_ids.shape[1], size, 0, ring.size)
        positions = torch.arange(split.length, device=input_ids.device).unsqueeze(0)
        with sequence_attention.running(SplitForward(split, None)):
            return forward(
                input_ids=split.part(input_ids),
                position_ids=split.part(positions),
                labels=None if labels is None else split.part(next_labels(labels)),
                **{"use_cache": False, **options},
            )

    model.loss_function = loss_of_part
    model.forward = run


def _pass_on(traffic: Traffic, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    traffic.note(Role.SEQUENCE, tensor.nbytes)
    received = torch.empty_like(tensor)
    return lambda: received


def _refuse_to_gather(size: int, num_groups: int, part: torch.Tensor, dim: int) -> torch.Tensor:
    asked = f"config.dist.{axis_with(Role.SEQUENCE, Role.SHARD)}.size = {size}"
    raise ConfigError(
        f"{asked} computes attention in {num_groups} groups of devices, which gather keys and values where it has "
        "dropout or a mask that is more than causal, as of a sliding window; the memory plan has the ring of a causal "
        "mask only: plan without attention's dropout and with batches no longer than the window, or for a size that "
        "divides the heads, without ring_size"
    )


def _exchange(size: int, traffic: Traffic, tensor: torch.Tensor, split: int, joined: int) -> torch.Tensor:
    exchanged: torch.Tensor = _Exchanged.apply(tensor, size, traffic, split, joined)
    return exchanged


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, traffic: Traffic, split: int, joined: int) -> torch.Tensor:
        ctx.how = size, traffic, joined, split
        traffic.note(Role.SEQUENCE, tensor.nbytes * (size - 1) // size)
        parts = torch.stack(tensor.chunk(size, split))
        received = parts.clone()
        return torch.cat(received.unbind(), joined)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        size, traffic, split, joined = ctx.how
        return _exchange(size, traffic, gradient, split, joined), None, None, None, None


# Experts


def _spread_experts(module: Any, experts: Experts, num_sharing: int, traffic: Traffic) -> None:
    """Replace a module's forward: it computes as many tokens as it is sent where all experts have equally many.

    Args:
        module: The module, which is changed in place.
        experts: Which experts lie where.
        num_sharing: How many devices share layers, and so have the same tokens, of which each sends a part.
        traffic: Notes what is sent.
    """
    forward: Callable[..., torch.Tensor] = module.forward
    for name, old in list(module.named_parameters(recurse=False)):
        shape = (experts.num_held, *old.shape[1:])
        held = torch.empty(shape, dtype=old.dtype, device=old.device)
        module._parameters[name] = nn.Parameter(held, old.requires_grad)
    module.num_experts = experts.num_held
    size = len(experts.held)

    def run(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = torch.empty_like(chosen).reshape(-1)
        rows = _send_rows(hidden[order // chosen.shape[1]], size, traffic)
        own_weights = _send_rows(weights.reshape(-1)[order], size, traffic)
        computed = forward(rows, torch.empty_like(order)[:, None], own_weights[:, None])
        back = _send_rows(computed, size, traffic)
        of_tokens = torch.empty_like(order)
        wide = torch.promote_types(back.dtype, torch.float32)
        return back[of_tokens].view(*chosen.shape, -1).sum(1, dtype=wide).to(hidden.dtype)

    def run_part(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        own, chosen, own_weights = (_first_rows(rows, num_sharing, traffic) for rows in (hidden, chosen, weights))
        return _join_rows(run(own, chosen, own_weights), num_sharing, traffic)[: len(hidden)]

    module.forward = run if num_sharing == 1 else run_part


def _first_rows(rows: torch.Tensor, num_sharing: int, traffic: Traffic) -> torch.Tensor:
    cut: torch.Tensor = _FirstRows.apply(rows, num_sharing, traffic)
    return cut


def _join_rows(rows: torch.Tensor, num_sharing: int, traffic: Traffic) -> torch.Tensor:
    joined: torch.Tensor = _JoinedRows.apply(rows, num_sharing, traffic)
    return joined


class _FirstRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, num_sharing: int, traffic: Traffic) -> torch.Tensor:
        ctx.how = len(rows), num_sharing, traffic
        return rows[: -(-len(rows) // num_sharing)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        length, num_sharing, traffic = ctx.how
        return _join_rows(gradient, num_sharing, traffic)[:length], None, None


class _JoinedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, num_sharing: int, traffic: Traffic) -> torch.Tensor:
        ctx.how = num_sharing, traffic
        traffic.note(Role.TENSOR, rows.nbytes * (num_sharing - 1))
        return torch.cat([rows] * num_sharing)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _first_rows(gradient, *ctx.how), None, None


def _send_rows(rows: torch.Tensor, size: int, traffic: Traffic) -> torch.Tensor:
    sent: torch.Tensor = _SentRows.apply(rows, size, traffic)
    return sent


class _SentRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, size: int, traffic: Traffic) -> torch.Tensor:
        ctx.how = size, traffic
        traffic.note(Role.EXPERT, rows.nbytes * (size - 1) // size)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _send_rows(gradient, *ctx.how), None, None


# Stages


def _run_stage(model: Any, plan: ShardingPlan, stage: int, dtype: torch.dtype, traffic: Traffic) -> None:
    """Replace a model's forward: it takes a microbatch, and computes one stage of it, as `pipelined_model`."""
    pipeline = plan.pipeline
    modules, last = StageModules(model, pipeline, stage % pipeline.num_devices, dtype), pipeline.size - 1
    anchor = torch.zeros((), device="meta", requires_grad=True)
    forward = model.forward

    def run(**batch: torch.Tensor) -> Mapping[str, Any]:
        if stage > 0:
            modules.receive = lambda shape: _Received.apply(anchor, tuple(shape), dtype, traffic)
        given = batch if stage == last else {name: value for name, value in batch.items() if name != "labels"}
        with modules.computing(stage):
            output = forward(**given, use_cache=False)
        hidden, modules.receive, modules.computed = modules.computed, None, None
        if stage == last:
            return {"loss": output.loss}
        return {"loss": _Passed.apply(hidden, traffic)}

    model.forward = run


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, traffic: Traffic
    ) -> torch.Tensor:
        ctx.traffic = traffic
        return torch.empty(shape, dtype=dtype, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.traffic.note(Role.PIPELINE, gradient.nbytes)
        return gradient.new_zeros(()), None, None, None


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, traffic: Traffic) -> torch.Tensor:
        ctx.how = hidden.shape, hidden.dtype
        traffic.note(Role.PIPELINE, hidden.nbytes)
        return torch.zeros((), device=hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        shape, dtype = ctx.how
        return torch.empty(shape, dtype=dtype, device=gradient.device), None
