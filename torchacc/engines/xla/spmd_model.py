"""A model that lies annotated on the mesh of the SPMD engine, and is computed by one program."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchacc.engines.optimizers import is_elementwise
from torchacc.engines.patches import model_patches
from torchacc.engines.patches.split_heads import HeadsStayApart
from torchacc.engines.xla import spread_experts
from torchacc.engines.xla.annotated_gather import AnnotatedGatherer
from torchacc.engines.xla.gather import Weight
from torchacc.engines.xla.partition import Spec
from torchacc.engines.xla.scan import LayerScan
from torchacc.engines.xla.split_tokens import TokensStaySplit
from torchacc.engines.xla.xla_engine import XlaModel
from torchacc.engines.xla.xla_shards import SpmdShards
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import get_logger
from torchacc.parallel.axes import ParameterSpec, Role, dim_over, entry_of
from torchacc.parallel.experts import EXPERT_SHARDING_ROLES, spread_spec
from torchacc.parallel.plan import PlannedParameter, ShardingPlan
from torchacc.parallel.sharding import partition_spec

if TYPE_CHECKING:
    from torchacc.engines.xla.spmd import SpmdEngine

_log = get_logger(__name__)


class SpmdModel(XlaModel):
    """A model that lies annotated on the mesh of an SPMD engine."""

    engine: "SpmdEngine"

    def __init__(self, engine: "SpmdEngine", model: nn.Module, plan: ShardingPlan) -> None:
        super().__init__(engine, model, plan)
        self._specs: dict[torch.Tensor, ParameterSpec] = {}
        """How each parameter is split."""

    @cached_property
    def shards(self) -> SpmdShards:
        """What this process holds of the parameters: all of them, or those of its host."""
        return SpmdShards(self.engine, self.model, self.plan, self._specs)

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Move the model to the mesh and install the hooks that gather its weights."""
        engine = self.engine
        spread = [experts.module for experts in self.plan.experts]
        model_patches.prepare(self.model, partitioned=engine.is_partitioned, spread=spread)
        replaced: dict[torch.Tensor, nn.Parameter] = {}
        for unit in self.plan.units:
            module = self.model.get_submodule(unit.name)
            weights: list[Weight] = []
            for planned in unit.parameters:
                spec = self._spec_of(planned, is_spread=unit.name in spread)
                for original, weight in self._make_weights([planned], partial(self._place, spec=spec)):
                    replaced[original] = weight.shard
                    self._specs[weight.shard] = spec
                    weights.append(weight)
            if engine.is_partitioned:
                # A 1-D weight is left to XLA, which gathers so little by itself without harm.
                split = [weight for weight in weights if len(weight.shape) > 1 and self._is_sharded(weight.shard)]
                again = self.plan.is_resharded_after_forward(unit)
                stay = EXPERT_SHARDING_ROLES if unit.name in spread else (Role.TENSOR,)
                gatherer = AnnotatedGatherer(split, engine.annotate, self._specs, stay, reshard_after_forward=again)
                self._install_unit(module, gatherer)
                if unit.name in spread:
                    spread_experts.install(module, engine.mesh, engine.annotate)
                else:
                    self._constrain_output(module, between_units=bool(unit.name))
        if self.plan.tensor_parallel.sequence_parallel or engine.mesh.size(Role.SEQUENCE) > 1:
            self._constrain_embeddings()
        self._install_recompute()
        self._scans = [self._make_scan(name) for name in self.plan.scanned]
        self._move_buffers()
        self._install_forward(self._run)
        return replaced

    def _spec_of(self, planned: PlannedParameter, *, is_spread: bool) -> ParameterSpec:
        """Return how a parameter is split at rest."""
        mesh = self.engine.mesh
        how = spread_spec(planned.shape, mesh) if is_spread else self.plan.tensor_parallel.spec_of(planned.name)
        return partition_spec(planned.shape, mesh, how)

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Hold the patches of a forward; where heads are split, with products that leave them where they are."""
        with ExitStack() as stack:
            if self.plan.tensor_parallel.size > 1:
                stack.enter_context(HeadsStayApart())
            if self.engine.mesh.size(Role.SEQUENCE) > 1:
                stack.enter_context(TokensStaySplit(self._place_tokens))
            for scan in self._scans:
                stack.enter_context(scan.running())
            stack.enter_context(super().patched())
            yield

    def _make_scan(self, name: str) -> LayerScan:
        """Replace a list of layers by a loop."""
        layers = self.model.get_submodule(name)
        first = dict(layers[0].named_parameters())  # type: ignore[index]
        inner = set(layers[0].modules())  # type: ignore[index]
        units = [unit for unit in self._units if unit.module in inner]
        gatherers = [unit.gatherer for unit in units if isinstance(unit.gatherer, AnnotatedGatherer)]
        gathered = {weight.shard: (weight, gatherer) for gatherer in gatherers for weight in gatherer.weights}

        def unshard(parameter: str, shard: torch.Tensor) -> torch.Tensor:
            if first[parameter] not in gathered:
                return shard
            weight, gatherer = gathered[first[parameter]]
            return gatherer.gather_one(shard, weight)

        def annotate(tensor: torch.Tensor, spec: Spec | None) -> None:
            if spec is not None and self.engine.is_partitioned:
                self.engine.annotate(tensor, spec)

        return LayerScan(
            layers,  # type: ignore[arg-type]
            units,
            unshard=unshard,
            annotate_stack=lambda parameter, stack: annotate(stack, (None, *self._specs[first[parameter]])),
            annotate_output=lambda output: annotate(output, self._activation_spec(output, between_units=True)),
            patches=self.patched,
        )

    def _is_sharded(self, parameter: torch.Tensor) -> bool:
        return dim_over(self._specs[parameter], Role.SHARD) is not None

    def _place(self, tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
        return self.engine.transfer([tensor], [spec])[0]

    def _constrain_output(self, module: nn.Module, *, between_units: bool) -> None:
        engine, user_rule = self.engine, self.engine.config.dist.fsdp.shard_output_callable

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if user_rule is not None:
                user_rule(output, engine.xla_mesh)
                return
            tensor = _first_tensor(output)
            spec = self._activation_spec(tensor, between_units) if tensor is not None else None
            if tensor is not None and spec is not None:
                engine.annotate(tensor, spec)

        module.register_forward_hook(hook)

    def _place_tokens(self, tensor: torch.Tensor, are_split: bool) -> torch.Tensor:
        """Return queries, keys or values of shape (batch, heads, tokens, size) with a part of the tokens, or all."""
        engine, mesh = self.engine, self.engine.mesh
        spec, heads, tokens = engine.batch_spec(tensor), mesh.axes(Role.TENSOR), mesh.axes(Role.SEQUENCE)
        if spec is None or tensor.shape[1] % mesh.size(Role.TENSOR) or tensor.shape[2] % mesh.size(Role.SEQUENCE):
            return tensor
        placed = tensor.clone()
        engine.annotate(placed, (spec[0], entry_of(heads), entry_of(tokens) if are_split else None, None))
        return placed

    def _constrain_embeddings(self) -> None:
        """Split what the model's own embeddings return along the sequence, as that is what the first unit gets."""
        units = [unit.name for unit in self.plan.units if unit.name]
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and not any(f"{name}.".startswith(f"{unit}.") for unit in units):
                self._constrain_output(module, between_units=True)

    def _activation_spec(self, tensor: torch.Tensor, between_units: bool) -> Spec | None:
        """Return how activations of shape (batch, length, …) are split; None where the batch does not divide."""
        if tensor.dim() != 3:
            return self.engine.batch_spec(tensor)
        is_sequence_parallel = between_units and self.plan.tensor_parallel.sequence_parallel
        roles = [Role.SEQUENCE, Role.TENSOR] if is_sequence_parallel else [Role.SEQUENCE]
        return self.engine.token_spec(tensor, self.engine.mesh.axes(*roles))

    def _before_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of an optimizer that asks for numbers in the midst of its step; check that hosts can keep its state."""
        if self.engine.job.launched and not is_elementwise(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} is not known to update each element by itself, and on several hosts a "
                "state that does not lie as its parameter does could not be saved: use an optimizer such as AdamW"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            _log.warning(
                "LBFGS decides by numbers in the midst of its step: XLA compiles what was recorded before each of "
                "them, which takes minutes. config.backend = 'native' runs it as it is; or take another one, such "
                "as AdamW"
            )

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        """Run each backward by itself, so that the recorded program does not grow over the window."""
        yield
        self.engine.sync()

    def check_parameters(self) -> None:
        """Check that the model has the parameters that were sharded, each with its shape."""
        super().check_parameters()
        for parameter, local_shard in self.shards.items():
            [(name, shape)] = local_shard.members
            if tuple(parameter.shape) != shape:
                raise EngineError(
                    f"{name!r} was sharded with the shape {shape}, and has got data of shape "
                    f"{tuple(parameter.shape)}: change the shapes of parameters before accelerate()"
                )

    def _run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's forward, once all hosts have come to it."""
        if self.engine.host_shards is not None:
            self.engine.host_shards.check_same_call((args, kwargs))
        return super()._run(inner, args, kwargs)


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output if isinstance(output, list | tuple) else ()
    return next((value for value in values if isinstance(value, torch.Tensor) and value.dim()), None)
