"""One process per XLA device under `torchrun`, with the parameters sharded between the processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import nn

from torchacc.config import Config
from torchacc.engines.base import average_scalars, remap_optimizer
from torchacc.engines.xla import quirks, runtime
from torchacc.engines.xla.base import XlaEngine, XlaModel
from torchacc.engines.xla.blocks import Block, Rows, flatten
from torchacc.engines.xla.device import DeviceExchange
from torchacc.engines.xla.exchange import Exchange, ShardedUnit
from torchacc.engines.xla.gather import Weight, install_unit
from torchacc.engines.xla.host import HostExchange
from torchacc.env import Job
from torchacc.errors import ConfigError
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

    @classmethod
    def count_devices(cls, config: Config, job: Job) -> int:
        """Return the number of processes: each has one device."""
        return job.num_processes

    def setup(self) -> None:
        """Start the process group, then the runtime with this process's one device."""
        self.group.start("gloo")
        if runtime.runs_on_cpu():
            runtime.pin_to_share_of_cores(self.job)
        runtime.start(num_devices=1, spmd=False, stream=self.job.rank)
        if not runtime.runs_on_cpu():
            runtime.check_num_processes(self.job)

    @cached_property
    def ordinal(self) -> int:
        """This process's device on the mesh; the CPU client, which knows itself only, has the launcher's rank."""
        return self.job.rank if runtime.runs_on_cpu() else runtime.ordinal()

    @property
    def data_shards(self) -> range:
        """This process's one device."""
        shard = self.topology.data_shard(self.ordinal)
        return range(shard, shard + 1)

    def make_exchange(self) -> Exchange:
        """Return the collectives for one model. Collective: every process."""
        if runtime.runs_on_cpu():
            return HostExchange(self.topology, self.group)
        return DeviceExchange(self.topology, self.ordinal)

    def apply(self, model: nn.Module, plan: WrapPlan, optimizer: torch.optim.Optimizer | None) -> "MultiprocessModel":
        """Shard a model in place between the processes."""
        sharded = MultiprocessModel(self, model, plan)
        sharded.shard(optimizer)
        return sharded

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Move tensors to the device in one transfer."""
        return runtime.to_device(tensors)


class MultiprocessModel(XlaModel):
    """A model of which this process holds one shard."""

    engine: MultiprocessEngine

    def shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Cut the parameters into shards and install the hooks that gather them."""
        self._state_names = list(self.model.state_dict())
        self._units: list[ShardedUnit] = []
        self._exchange = self.engine.make_exchange()
        quirks.prepare(self.model, partitioned=False)
        group_of = _optimizer_groups(optimizer)
        replaced: dict[torch.Tensor, nn.Parameter] = {}
        for unit in self.plan.units:
            module = self.model.get_submodule(unit.name)
            make = self._flat_blocks if self.plan.flatten else self._blocks
            made = list(make(unit, module, group_of))
            replaced |= {original: block.shard for originals, block in made for original in originals}
            self._units.append(self._exchange.make_unit([block for _, block in made]))
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
        return Rows(tuple(shape), self._exchange.num_shards)

    def _place(self, whole: torch.Tensor) -> torch.Tensor:
        shard = self._rows(whole.shape).cut(whole.detach().cpu(), self._exchange.shard_index)
        return self.engine.to_device([shard])[0]

    def zeros_like(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return zeros in the shape of a shard."""
        return self.engine.to_device([torch.zeros(parameter.shape, dtype=parameter.dtype)])[0]

    def finish(self, output: Any) -> Any:
        """Give the scalars of the output their means over all devices."""
        return average_scalars(output, self._exchange.average)

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        """Keep whole gradients, where the exchange can, until the first backward outside of the context."""
        self._exchange.holds_gradients = True
        try:
            yield
        finally:
            self._exchange.holds_gradients = False
            runtime.sync()

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
        total = self._exchange.combine_norms(norms, float(norm_type))
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return total

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the unsharded parameters and buffers on the CPU, by original name."""
        runtime.sync()
        whole: dict[str, torch.Tensor] = {}
        for unit in self._units:
            whole |= unit.state()
        for planned in self.plan.parameters:
            whole |= dict.fromkeys(planned.aliases, whole[planned.name])
        kept = self.model.state_dict()
        return {name: whole[name] if name in whole else kept[name].detach().cpu() for name in self._state_names}

    def local_numel(self) -> int:
        """Return the number of parameter elements that this process holds at rest."""
        return sum(block.rows.shard_numel for unit in self._units for block in unit.blocks)


def _optimizer_groups(optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, int]:
    groups = optimizer.param_groups if optimizer is not None else []
    return {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}


def _groups_fit(optimizer: torch.optim.Optimizer, units: Sequence[ShardedUnit]) -> bool:
    """Return whether an optimizer's groups are alike, or were there when the parameters were flattened."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if all(other == settings[0] for other in settings):
        return True
    owner = _optimizer_groups(optimizer)
    flattened_apart = [len({owner.get(block.shard) for block in unit.blocks}) > 1 for unit in units]
    return any(flattened_apart)
