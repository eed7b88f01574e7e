"""One process per XLA device under `torchrun`, with the parameters sharded between the processes.

On the CPU the collectives run on the host, between the programs: weights come in as data before the forward, and
gradients are reduced once the backward has run. Elsewhere they are part of the program.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from torchacc.config import Config
from torchacc.engines.base import average_scalars, remap_optimizer
from torchacc.engines.xla import quirks, runtime
from torchacc.engines.xla.base import XlaEngine, XlaModel
from torchacc.engines.xla.blocks import Rows, flatten, unflatten
from torchacc.engines.xla.collectives import HostCollectives
from torchacc.engines.xla.gather import Gatherer, Weight, install_unit
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError
from torchacc.plan import Unit, WrapPlan

# Each acts on whole tensors (row and column means, norms), and would silently act on one shard of them.
_NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon", "LAMB", "LARS", "Shampoo", "SOAP"}


class MultiprocessEngine(XlaEngine):
    """One process per XLA device."""

    kind: ClassVar[str] = "xla-multiprocess"
    no_effect: ClassVar[dict[str, str]] = {
        **XlaEngine.no_effect,
        "dist.fsdp.shard_output_callable": "each process has its own output: there is nothing to shard",
    }

    collectives: HostCollectives

    @classmethod
    def count_devices(cls, config: Config, job: Job) -> int:
        """Return the number of processes: each has one device."""
        return job.num_processes

    def setup(self) -> None:
        """Start the process group, then the runtime with this process's one device."""
        if not runtime.runs_on_cpu():
            raise EngineError(
                "several XLA processes are only supported on the CPU so far: on a TPU or GPU start one process with "
                'config.dist.fsdp.use_spmd = True, or use config.backend = "native"'
            )
        self.group.start("gloo")
        if not runtime.is_running():
            runtime.pin_to_share_of_cores(self.job)
        runtime.start(num_devices=1, spmd=False, stream=self.job.rank)
        self.collectives = HostCollectives(self.topology, self.group)

    @property
    def data_shards(self) -> range:
        """This process's one device."""
        shard = self.topology.data_shard(self.job.rank)
        return range(shard, shard + 1)

    def apply(self, model: nn.Module, plan: WrapPlan, optimizer: torch.optim.Optimizer | None) -> "MultiprocessModel":
        """Shard a model in place between the processes."""
        sharded = MultiprocessModel(self, model, plan)
        sharded.shard(optimizer)
        return sharded

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Move tensors to the device in one transfer."""
        return runtime.to_device(tensors)


@dataclass(eq=False)
class Block:
    """What is sharded as one: a parameter, or those of a unit that are flattened together."""

    shard: nn.Parameter
    rows: Rows
    weights: list[Weight]
    is_flat: bool
    gradient: torch.Tensor | None = None
    """The whole gradient of this process, until it is reduced."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the block travels in."""
        return self.shard.dtype if self.is_flat else self.weights[0].dtype

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole weights in the whole block."""
        if not self.is_flat:
            return [whole]
        views = unflatten(whole, [weight.shape for weight in self.weights])
        return [view.to(weight.dtype) for view, weight in zip(views, self.weights, strict=True)]


class MultiprocessModel(XlaModel):
    """A model of which this process holds one shard."""

    engine: MultiprocessEngine

    def shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Cut the parameters into shards and install the hooks that gather them."""
        self._state_names = list(self.model.state_dict())
        self._units: list[_HostUnit] = []
        self._reduce_is_queued = False
        quirks.prepare(self.model, partitioned=False)
        group_of = _optimizer_groups(optimizer)
        replaced: dict[torch.Tensor, nn.Parameter] = {}
        for unit in self.plan.units:
            module = self.model.get_submodule(unit.name)
            make = self._flat_blocks if self.plan.flatten else self._blocks
            made = list(make(unit, module, group_of))
            replaced |= {original: block.shard for originals, block in made for original in originals}
            self._units.append(_HostUnit([block for _, block in made], self))
            install_unit(module, self._units[-1])
        self.move_buffers()
        self.install_forward()
        if optimizer is not None:
            remap_optimizer(optimizer, replaced, lambda parameter, state: self._place(state))

    def _blocks(
        self, unit: Unit, module: nn.Module, group_of: dict[nn.Parameter, int]
    ) -> Iterator[tuple[list[nn.Parameter], Block]]:
        for original, weight in self.make_weights(iter(unit.parameters), self._place):
            yield [original], Block(weight.shard, self._rows(weight.shape), [weight], is_flat=False)

    def _flat_blocks(
        self, unit: Unit, module: nn.Module, group_of: dict[nn.Parameter, int]
    ) -> Iterator[tuple[list[nn.Parameter], Block]]:
        """Flatten what is trained alike: one block for each optimizer group, and one for what is frozen."""

        def alike(pair: tuple[nn.Parameter, Weight]) -> tuple[bool, int, str]:
            parameter = pair[0]
            return not parameter.requires_grad, group_of.get(parameter, 0), str(parameter.dtype)

        pairs = sorted(self.make_weights(iter(unit.parameters), lambda whole: whole), key=alike)
        for index, (_, members) in enumerate(groupby(pairs, key=alike)):
            originals, weights = map(list, zip(*members, strict=True))
            whole = flatten([original.detach() for original in originals])
            shard = nn.Parameter(self._place(whole), requires_grad=originals[0].requires_grad)
            module.register_parameter(f"flat_param_{index}", shard)
            for weight in weights:
                weight.shard = shard
                for owner, name in weight.slots:
                    del owner._parameters[name]
            yield originals, Block(shard, self._rows(whole.shape), weights, is_flat=True)

    def _rows(self, shape: Sequence[int]) -> Rows:
        return Rows(tuple(shape), self.engine.collectives.num_shards)

    def _place(self, whole: torch.Tensor) -> torch.Tensor:
        index = self.engine.topology.coordinates(self.engine.job.rank)["fsdp"]
        return self.engine.to_device([self._rows(whole.shape).cut(whole.detach().cpu(), index)])[0]

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return zeros in the shape of a shard."""
        return self.engine.to_device([torch.zeros(parameter.shape, dtype=parameter.dtype)])[0]

    def finish(self, output: Any) -> Any:
        """Give the model's loss its mean over all devices.

        The forward runs here, as a program of its own: the mean is known on the host only.
        """

        def mean(scalars: torch.Tensor) -> torch.Tensor:
            runtime.sync()
            return runtime.to_device([self.engine.group.mean(runtime.to_host([scalars])[0])])[0]

        return average_scalars(output, mean)

    def queue_reduction(self) -> None:
        """Let autograd reduce the gradients when the backward that runs now is done."""
        if not self._reduce_is_queued:
            self._reduce_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    @torch.no_grad()
    def _after_backward(self) -> None:
        self._reduce_is_queued = False
        runtime.sync()
        if not self._accumulating:
            for unit in self._units:
                unit.reduce()

    def _hold_gradients(self) -> AbstractContextManager[None]:
        """Keep whole gradients until the first backward outside of the context reduces their sum."""
        return nullcontext()

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the optimizer can work on shards, and create its state."""
        kind = type(optimizer).__name__
        if kind in _NOT_ELEMENTWISE:
            raise ConfigError(
                f"{kind} computes with whole weights, and each process here holds a shard of them, which gives other "
                "numbers: use config.dist.fsdp.use_spmd = True or config.backend = 'native', or an "
                "element-wise optimizer such as AdamW"
            )
        if self.plan.flatten and not _groups_fit(optimizer, self._units):
            raise ConfigError(
                "the optimizer has groups with different settings, and flatten_parameters=True left one parameter for "
                "each unit, so that the groups cannot mean what they say: set config.dist.fsdp.flatten_parameters = "
                "False, or hand the optimizer to accelerate(…, optimizer=optimizer), which flattens group by group"
            )
        super().prepare_optimizer(optimizer)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.engine.device)
        norms = torch.stack([torch.linalg.vector_norm(gradient.float(), norm_type) for gradient in gradients])
        local = runtime.to_host([norms])[0].double()
        combine = self.engine.collectives.combine_over_shards
        if norm_type == inf:
            total = combine(local.max(), dist.ReduceOp.MAX)
        else:
            total = combine(local.pow(norm_type).sum(), dist.ReduceOp.SUM).pow(1 / norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        total_here, scale_here = self.engine.to_device([total.float(), scale.float()])
        for gradient in gradients:
            gradient.mul_(scale_here)
        return total_here

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the unsharded parameters and buffers on the CPU, by original name."""
        runtime.sync()
        whole: dict[str, torch.Tensor] = {}
        for unit in self._units:
            whole |= unit.whole_by_name()
        for planned in self.plan.parameters:
            whole |= dict.fromkeys(planned.aliases, whole[planned.name])
        kept = self.model.state_dict()
        return {name: whole[name] if name in whole else kept[name].detach().cpu() for name in self._state_names}

    def local_numel(self) -> int:
        """Return the number of parameter elements that this process holds at rest."""
        return sum(block.rows.shard_numel for unit in self._units for block in unit.blocks)


class _HostUnit(Gatherer):
    """Whole weights as data: gathered on the host before the unit's forward, and kept until its backward has run."""

    keeps_weights = True
    shards_stand_alone = False

    def __init__(self, blocks: list[Block], model: MultiprocessModel) -> None:
        super().__init__([weight for block in blocks for weight in block.weights])
        self.blocks = blocks
        self._model = model
        self._engine = model.engine

    def gather(self) -> list[torch.Tensor]:
        whole = self._engine.to_device(self._gather_on_host([block.dtype for block in self.blocks]))
        parts = []
        for block, tensor in zip(self.blocks, whole, strict=True):
            if block.shard.requires_grad and torch.is_grad_enabled():
                tensor = _HostGather.apply(block.shard, tensor, block, self._model)
            parts += block.parts(tensor)
        return parts

    def reduce(self) -> None:
        """Average the whole gradients over all devices, and add this process's shard of them to the parameters'.

        A block that no process has a gradient of keeps none: each tells by one more element whether it has.
        """
        blocks = [block for block in self.blocks if block.shard.requires_grad]
        if not blocks:
            return
        have = {block: block.gradient for block in blocks if block.gradient is not None}
        host = dict(zip(have, runtime.to_host(list(have.values())), strict=True))
        shards = self._engine.collectives.num_shards
        columns = [
            block.rows.pad(host[block].float()).reshape(shards, -1)
            if block in host
            else torch.zeros(shards, block.rows.shard_numel)
            for block in blocks
        ]
        present = torch.tensor([float(block in host) for block in blocks]).expand(shards, -1)
        mean = self._engine.collectives.reduce_scatter_mean(torch.cat([*columns, present], dim=1))
        *parts, present = mean.split([*(block.rows.shard_numel for block in blocks), len(blocks)])
        kept = [index for index, share in enumerate(present.tolist()) if share > 0]
        moved = self._engine.to_device([parts[index].view(blocks[index].rows.shard_shape) for index in kept])
        for index, gradient in zip(kept, moved, strict=True):
            shard = blocks[index].shard
            shard.grad = gradient if shard.grad is None else shard.grad + gradient
        for block in blocks:
            block.gradient = None

    def whole_by_name(self) -> dict[str, torch.Tensor]:
        """Return the unit's whole weights on the host, in the dtype that they are stored in."""
        found: dict[str, torch.Tensor] = {}
        for block, whole in zip(self.blocks, self._gather_on_host([b.shard.dtype for b in self.blocks]), strict=True):
            parts = unflatten(whole, [weight.shape for weight in block.weights]) if block.is_flat else [whole]
            found |= {weight.name: part.clone() for weight, part in zip(block.weights, parts, strict=True)}
        return found

    def _gather_on_host(self, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
        """Return the whole blocks; those of one dtype travel together."""
        shards = runtime.to_host([block.shard.detach() for block in self.blocks])
        whole: dict[int, torch.Tensor] = {}
        for dtype in dict.fromkeys(dtypes):
            chosen = [index for index, other in enumerate(dtypes) if other == dtype]
            gathered = self._engine.collectives.all_gather(flatten([shards[index].to(dtype) for index in chosen]))
            parts = gathered.split([self.blocks[index].rows.shard_numel for index in chosen], dim=1)
            whole |= {index: self.blocks[index].rows.join(part) for index, part in zip(chosen, parts, strict=True)}
        return [whole[index] for index in range(len(self.blocks))]


class _HostGather(torch.autograd.Function):
    """Stands between a shard and its whole weight; keeps the weight's gradient for the reduction after backward."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, whole: torch.Tensor, block: Block, model: MultiprocessModel
    ) -> torch.Tensor:
        ctx.block, ctx.model = block, model
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        block = ctx.block
        block.gradient = grad if block.gradient is None else block.gradient + grad
        ctx.model.queue_reduction()
        return None, None, None, None


def _optimizer_groups(optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, int]:
    groups = optimizer.param_groups if optimizer is not None else []
    return {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}


def _groups_fit(optimizer: torch.optim.Optimizer, units: Sequence[_HostUnit]) -> bool:
    """Return whether an optimizer's groups are alike, or were there when the parameters were flattened."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if all(other == settings[0] for other in settings):
        return True
    owner = _optimizer_groups(optimizer)
    flattened_apart = [len({owner.get(block.shard) for block in unit.blocks}) > 1 for unit in units]
    return any(flattened_apart)
