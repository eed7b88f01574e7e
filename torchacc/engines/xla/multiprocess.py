"""One process per XLA device under `torchrun`, with the parameters sharded between the processes."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from torchacc.config import Config
from torchacc.engines.clipping import register_total_norm
from torchacc.engines.device_losses import average_scalars
from torchacc.engines.failed_backwards import clean_up_after
from torchacc.engines.optimizers import is_elementwise
from torchacc.engines.patches import model_patches, torch_patches
from torchacc.engines.sample_rows import SampleGatherer
from torchacc.engines.xla import hardware, runtime
from torchacc.engines.xla.collectives import Collectives, GatheredParameter, ParameterGatherer, flatten
from torchacc.engines.xla.device_collectives import DeviceCollectives, DeviceSampleGatherer
from torchacc.engines.xla.gather import Weight
from torchacc.engines.xla.host_collectives import HostCollectives, XlaSampleGatherer
from torchacc.engines.xla.sharded_tensor import Reader, ShardedTensor, ShardOrigin, as_shard, without_padding
from torchacc.engines.xla.xla_engine import XlaEngine, XlaModel
from torchacc.engines.xla.xla_shards import ProcessShards
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import get_logger
from torchacc.parallel.axes import Role
from torchacc.parallel.plan import ShardingPlan, Unit
from torchacc.parallel.sharding import RowLayout

_log = get_logger(__name__)

# These compute with full weights (means of rows, norms), and would silently take a shard for one.
_NOT_ELEMENTWISE = {
    "adafactor", "dadaptadam", "dadaptlion", "dadaptsgd", "lamb", "lars", "lbfgs", "muon", "novograd", "prodigy",
    "shampoo", "soap",
}  # fmt: skip


class MultiprocessEngine(XlaEngine):
    """One process per XLA device."""

    name: ClassVar[str] = "xla-multiprocess"
    no_effect: ClassVar[dict[str, str]] = {
        **XlaEngine.no_effect,
        "dist.fsdp.shard_output_callable": "each process has its own output: there is nothing to shard",
    }

    @classmethod
    def count_devices(cls, config: Config, job: Job) -> int:
        """Return the number of processes: each has one device."""
        cls.check_devices()
        hardware.check_one_each(job)
        return job.num_processes

    @classmethod
    def check_devices(cls) -> None:
        """Refuse NVIDIA GPUs."""
        hardware.refuse_one_process_per_gpu()

    def check(self, model: nn.Module) -> None:
        """Refuse what partitions a program: each process has one of its own."""
        super().check(model)
        if self.config.compute.scan_layers:
            raise ConfigError(
                "compute.scan_layers = True with one XLA process per device: weights are exchanged between its "
                "programs, and a loop is inside of one. Use config.dist.fsdp.use_spmd = True, `python your_script.py`"
            )
        if self.mesh.size(Role.TENSOR) > 1:
            raise ConfigError(
                f"config.dist.tp.size = {self.mesh.size(Role.TENSOR)} with one XLA process per device: layers are "
                "split in one program for all devices: config.dist.fsdp.use_spmd = True, and `python your_script.py`"
            )
        if self.mesh.size(Role.SEQUENCE) > 1:
            raise ConfigError(
                f"config.dist.sp.size = {self.mesh.size(Role.SEQUENCE)} with one XLA process per device, where no "
                "attention reaches the tokens of others: use config.dist.fsdp.use_spmd = True and `python "
                'your_script.py`, or config.backend = "native"'
            )

        if self.mesh.size(Role.EXPERT) > 1:
            raise ConfigError(
                f"config.dist.ep.size = {self.mesh.size(Role.EXPERT)} with one XLA process per device, whose programs "
                "are of fixed shapes: how many tokens go to which device is known only when a step runs. Use "
                "config.dist.fsdp.use_spmd = True and `python your_script.py`, where each device computes its experts "
                'for all tokens, or config.backend = "native"'
            )

    def setup(self, plan: ShardingPlan) -> None:
        """Start the process group, then the runtime with this process's one device."""
        self.group.start()
        self.group.prepare_call_checks()
        if runtime.runs_on_cpu():
            runtime.pin_to_share_of_cores(self.job)
        if plan.recomputed:
            runtime.use_plain_scheduler(recomputes=True)
        self.open_compile_cache()
        runtime.start(num_devices=1, spmd=False, seed=torch.initial_seed() + self.job.rank, job=self.job)

    def make_collectives(self) -> Collectives:
        """Return the collectives for one model. Collective: every process."""
        if runtime.runs_on_cpu():
            return HostCollectives(self.mesh, self.group)
        return DeviceCollectives(self.mesh, self.job.rank, self.ordinals, self.group.check_same_call)

    @cached_property
    def ordinals(self) -> list[int]:
        """PJRT's number of the device of each process, by rank. Made by a collective: every process."""
        return self.group.all_gather_objects(runtime.ordinal())

    @cached_property
    def _sample_gatherer(self) -> SampleGatherer:
        """The collectives of rows between processes. Made by a collective: every process."""
        if runtime.runs_on_cpu():
            return XlaSampleGatherer(self.group, self.mesh, self._run_recorded)
        return DeviceSampleGatherer(self.group, self.mesh, self.ordinals)

    def _run_recorded(self) -> None:
        """Run what has been recorded so far of a step that goes on."""
        goes_on = self.has_recorded
        self.sync()
        self.has_recorded = goes_on

    def apply(
        self, model: nn.Module, plan: ShardingPlan, optimizer: torch.optim.Optimizer | None
    ) -> "MultiprocessModel":
        """Shard a model in place between the processes."""
        sharded = MultiprocessModel(self, model, plan)
        sharded.shard(optimizer)
        return sharded

    def move_inputs(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move tensors of a batch to the device in one transfer."""
        return runtime.to_device(tensors)


class MultiprocessModel(XlaModel):
    """A model of which this process holds one shard."""

    engine: MultiprocessEngine

    @cached_property
    def shards(self) -> ProcessShards:
        """What this process holds of the parameters."""
        return ProcessShards(self.engine, self.model, self.plan, self._gatherers)

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Cut the parameters into shards and install the hooks that gather them."""
        _explain_gradients()
        clean_up_after(self)
        self._gatherers: list[ParameterGatherer] = []
        self._collectives = self.engine.make_collectives()
        self._collectives.reduce_dtype = getattr(torch, self.plan.reduce_dtype)
        model_patches.prepare(self.model, partitioned=False)
        self._flattened_for = optimizer
        replaced: dict[torch.Tensor, nn.Parameter] = {}
        for unit in self.plan.units:
            module = self.model.get_submodule(unit.name)
            made = list(
                self._flattened_parameters(unit, module) if self.plan.flatten else self._sharded_parameters(unit)
            )
            replaced |= {original: parameter.shard for originals, parameter in made for original in originals}
            parameters = [parameter for _, parameter in made]
            self._gatherers.append(
                self._collectives.make_gatherer(
                    parameters, reshard_after_forward=self.plan.is_resharded_after_forward(unit)
                )
            )
            self._install_unit(module, self._gatherers[-1])
            for parameter in parameters:
                assert isinstance(parameter.shard, ShardedTensor)
                names = [weight.name for weight in parameter.weights]
                parameter.shard._name = f"the parameter {names[0]!r}" if len(names) == 1 else f"a parameter of {names}"
                parameter.shard._read = partial(self._gatherers[-1].read, parameter)
        self._install_recompute()
        self._move_buffers()
        self._install_forward(self._run)
        register_total_norm(self, _total_norm)
        return replaced

    def _sharded_parameters(self, unit: Unit) -> Iterator[tuple[list[nn.Parameter], GatheredParameter]]:
        for original, weight in self._make_weights(unit.parameters, self._place):
            yield [original], GatheredParameter(weight.shard, self._rows(weight.shape), [weight], is_flat=False)

    def _flattened_parameters(
        self, unit: Unit, module: nn.Module
    ) -> Iterator[tuple[list[nn.Parameter], GatheredParameter]]:
        """Flatten what is trained alike: one parameter for each optimizer group, and one for what is frozen."""
        groups = self._flattened_for.param_groups if self._flattened_for is not None else []
        group_of = {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}

        def alike(pair: tuple[nn.Parameter, Weight]) -> tuple[bool, int, str]:
            parameter, weight = pair
            return not parameter.requires_grad, group_of.get(parameter, 0), str(weight.shard.dtype)

        pairs = sorted(self._make_weights(unit.parameters, lambda full: full), key=alike)
        for index, (_, members) in enumerate(groupby(pairs, key=alike)):
            originals, weights = map(list, zip(*members, strict=True))
            full = flatten([weight.shard.detach() for weight in weights])
            shard = nn.Parameter(self._place(full), requires_grad=originals[0].requires_grad)
            module.register_parameter(f"flat_param_{index}", shard)
            for weight in weights:
                weight.shard = shard
                for owner, name in weight.owners:
                    del owner._parameters[name]
            yield originals, GatheredParameter(shard, self._rows(full.shape), weights, is_flat=True)

    def _rows(self, shape: Sequence[int]) -> RowLayout:
        return RowLayout(tuple(shape), self._collectives.num_shards)

    def _place(self, full: torch.Tensor) -> torch.Tensor:
        rows = self._rows(full.shape)
        if full.is_meta:
            shard = torch.zeros(rows.shard_shape, dtype=full.dtype)
        else:
            shard = rows.shard(full.detach().cpu(), self._collectives.shard_index)
        return as_shard(runtime.to_device([shard])[0], ShardOrigin(rows, self._collectives))

    def _run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's forward, and give the scalars of its output their means over all devices."""
        output = super()._run(inner, args, kwargs)
        return average_scalars(output, self._collectives.average)

    def _watch_backward(self, output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            output.register_hook(lambda gradient: self._collectives.begin_backward())
        return super()._watch_backward(output)

    def end_failed_backward(self, *, accumulates: bool) -> None:
        """Clean up after a backward that has raised, of this model or of another."""
        if self._collectives.end_failed_backward(accumulates=accumulates):
            self.status.on_lost_gradients(each for each in self.model.parameters() if each.requires_grad)

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        """Keep full gradients, where the collectives can, until the first backward outside of the context."""
        self._collectives.holds_gradients = True
        try:
            yield
        finally:
            self._collectives.holds_gradients = False
            self.engine.sync()

    def _drop_window(self) -> None:
        self._collectives.drop_gradients()

    def on_unscale(self) -> None:
        """Refuse PyTorch's own `GradScaler`, which looks for infinities in this process's shards alone."""
        raise EngineError(
            "torch.amp.GradScaler with one XLA process per device: each would skip steps by what it finds in its own "
            "shards. Leave it out, as what XLA computes in (float32 or bfloat16) needs none; or take "
            "torchacc.GradScaler(model), which is disabled here and scales natively"
        )

    def _before_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the optimizer can work on shards."""
        _check_elementwise(optimizer)
        alike = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        if self.plan.flatten and optimizer is not self._flattened_for and any(other != alike[0] for other in alike):
            raise ConfigError(
                "the optimizer has groups with different settings, and flatten_parameters=True left one parameter for "
                "each unit, so that the groups cannot mean what they say: set config.dist.fsdp.flatten_parameters = "
                "False, or hand the optimizer to accelerate(…, optimizer=optimizer), which flattens group by group"
            )

    def _numbers_on_device(self, update: str, parameters: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context for an update, which also knows nothing of shards where it makes no state."""
        context = super()._numbers_on_device(update, parameters)
        return context if update == "_single_tensor_sgd" else _on_plain_tensors(context)


@functools.cache
def _explain_gradients() -> None:
    torch_patches.hold_until_exit(torch_patches.runs_of_graphs(_run_graph))


def _run_graph(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a graph of autograd's; say where an unsharded gradient comes from that does not fit a shard."""
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        if "returned an invalid gradient at index" not in str(error):
            raise
        raise EngineError(
            f"{str(error).splitlines()[0]}. Was that autograd.Function given a parameter outside of the forward of the "
            "unit that the parameter belongs to? With one XLA process per device it is a shard there. Call the "
            "function inside of that forward, write it with PyTorch's own functions, or use "
            "config.dist.fsdp.use_spmd = True or the native engine"
        ) from error


@contextmanager
def _on_plain_tensors(context: AbstractContextManager[None]) -> Iterator[None]:
    with context, DisableTorchFunctionSubclass():
        yield


def _total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    """Return the norm of gradients that are shards, all or some of them, or None for others."""
    of_model: dict[Reader, list[torch.Tensor]] = {}
    others: list[torch.Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, ShardedTensor):
            of_model.setdefault(gradient._origin.reader, []).append(without_padding(gradient))
        else:
            others.append(gradient)
    if not of_model:
        return None
    norms = [
        model.combine_norms(torch.stack([_norm(shard, norm_type) for shard in shards]), norm_type)
        for model, shards in of_model.items()
    ]
    norms += [_norm(gradient, norm_type).to(norms[0].device) for gradient in others]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor.float(), norm_type)
    return norm


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    names = [base.__name__ for base in type(optimizer).__mro__]
    if any(name.casefold() in _NOT_ELEMENTWISE for name in names):
        raise ConfigError(
            f"{names[0]} computes with full weights, and each process here holds a shard of them, which gives other "
            "numbers: use config.dist.fsdp.use_spmd = True, or an element-wise optimizer such as AdamW"
        )
    if not is_elementwise(optimizer):
        _log.warning(
            "%s is not known here: its numbers are right only if it updates each element by itself, without norms or "
            "means of full weights, of which each process holds a shard. Otherwise use SPMD or the native engine",
            names[0],
        )
