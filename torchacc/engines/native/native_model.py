"""A model that FSDP2 has sharded, one process per device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from torchacc.engines.clipping import register_total_norm
from torchacc.engines.device_losses import average_scalars, mean_of_closure
from torchacc.engines.fused_steps import fuse
from torchacc.engines.initial_values import materialise_parameters, move_buffers
from torchacc.engines.native import (
    compiled_units,
    expert_parallel,
    float8_training,
    optimizer_checks,
    scalar_parameters,
    script_reads,
    split_layers,
    split_sequence,
    step_in_backward,
)
from torchacc.engines.native.activation_offload import SaveActivationsOnHost
from torchacc.engines.native.autocast import autocast_to
from torchacc.engines.native.native_engine import NativeEngine
from torchacc.engines.native.native_shards import NativeShards
from torchacc.engines.native.norm_statistics import keep_precision_of_statistics, lower_inputs_of_norms
from torchacc.engines.native.recomputed_forward import install_recompute
from torchacc.engines.patches import torch_patches
from torchacc.engines.sharded_model import ShardedModel
from torchacc.errors import ConfigError
from torchacc.logging import get_logger
from torchacc.parallel.axes import Role
from torchacc.parallel.plan import ShardingPlan, Unit

_log = get_logger(__name__)

if TYPE_CHECKING:
    from torchacc.engines.native.fsdp_groups import FSDPGroups


class NativeModel(ShardedModel):
    """A model whose parameters are DTensors."""

    engine: NativeEngine
    _compiled: compiled_units.CompiledUnits | None = None
    """What `compute.compile` compiles."""
    _steps: step_in_backward.StepInBackward | None = None
    """What steps the weights in backward."""

    @cached_property
    def shards(self) -> NativeShards:
        """What this process holds of the parameters."""
        return NativeShards(self.engine, self.model, self.plan)

    @property
    def _own_plan(self) -> ShardingPlan:
        """The plan of what this process computes."""
        return self.plan

    @property
    def _root(self) -> nn.Module:
        """The module that FSDP2 takes for the model."""
        return self.model

    def _returns_outputs(self) -> bool:
        """Return whether the forward that runs returns what the model's returns."""
        return True

    def _module_of(self, unit: Unit) -> nn.Module:
        return self.model.get_submodule(unit.name) if unit.name else self._root

    def step_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Step each sharded parameter as soon as backward has its gradient."""
        self._fuse_if_compiled(optimizer)  # the first backward is a step already
        self._steps = step_in_backward.StepInBackward(self.model, optimizer, self.status)

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Move the model to the device and shard its units."""
        from torchacc.engines.native.gradients import average_ordinary_gradients

        _refuse_without_gradients(self.model)
        move_buffers(self.model, self.engine.device)
        originals = {planned.name: self.model.get_parameter(planned.name) for planned in self.plan.parameters}
        if self.plan.float8 is not None:
            float8_training.convert(self.model, self.plan.float8)
        self._compile_units()
        if self.plan.tensor_parallel.size > 1:
            is_compiled = self._compiled is not None
            split_layers.split_forwards(self.model, self._own_plan, self.engine.tp_mesh, is_compiled=is_compiled)
        attention = split_sequence.install(
            self.model, self.engine.mesh, self.engine.group, self.plan.ring_size, self._returns_outputs
        )
        sharing = self.engine.tp_mesh.get_group() if self.plan.tensor_parallel.size > 1 else None
        # Made on all ranks, also on those whose stages have no experts.
        expert_mesh = self.engine.expert_mesh if self.plan.experts else None
        for experts in self._own_plan.experts:
            module = self.model.get_submodule(experts.module)
            expert_parallel.install(module, experts, expert_mesh, sharing)
        self._install_forward(self._run)
        if attention is not None:  # last: _install_forward() sets the kernel that the config names
            split_sequence.choose_attention(self.model, attention)
        self._prepare_parameters()
        # The model itself first: fully_shard looks for a module's parameters outside of what is sharded already, and so
        # would not find one that is tied between two units, and is therefore the model's.
        for unit in (self._own_plan.units[-1], *self._own_plan.units[:-1]):
            self._shard_unit(unit)
        self._set_prefetch()
        average_ordinary_gradients(self.model, self._own_plan)
        self._take_over_groups()
        if torch_patches.knows_clipping():
            self._register_total_norm()
        if self._lowered is not None:
            keep_precision_of_statistics(self.model)
            if self.engine.device.type == "cpu":
                lower_inputs_of_norms(self.model, self._lowered)
        shards: dict[torch.Tensor, nn.Parameter] = {
            original: self.model.get_parameter(name) for name, original in originals.items()
        }
        for original, new in shards.items():
            vars(new).update({key: value for key, value in vars(original).items() if key not in vars(new)})
        if self._own_plan.recomputed:
            install_recompute(self.model, self._own_plan, self._compiled)
        return shards

    def _prepare_parameters(self) -> None:
        """Make distributed tensors of the parameters that `fully_shard()` does not take."""
        if self._has_scalar_parameters:
            scalar_parameters.replicate(self.model, self.plan, self.engine.device_mesh, self.engine.device)

    def _register_total_norm(self) -> None:
        """Register the norm over all shards with PyTorch's own clipping."""
        from torchacc.engines.native.gradients import total_norm

        register_total_norm(self, total_norm)

    def _compile_units(self) -> None:
        if self.engine.config.compute.compile:
            self._compiled = compiled_units.CompiledUnits(self.model, self._own_plan, self.engine.config)

    def _shard_unit(self, unit: Unit) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        module = self._module_of(unit)
        # Here and not for all of the model, so that no more than one unit is ever unsharded.
        materialise_parameters(self.model, unit.parameters, self.plan, self.engine.device)
        mesh = self.engine.device_mesh
        experts = next((each for each in self.plan.experts if each.module == unit.name), None)
        if experts is not None:
            mesh = self.engine.expert_mesh[mesh.mesh_dim_names]
            expert_parallel.keep_own(module, experts, self.engine.expert_mesh)
        elif self.plan.tensor_parallel.size > 1:
            split_layers.distribute(self.model, unit.parameters, self.plan.tensor_parallel, self.engine.tp_mesh)
        own = [self.model.get_parameter(planned.name) for planned in unit.parameters if planned.shape]
        offload = OffloadPolicy()
        if self.plan.shards_on_host:
            offload = CPUOffloadPolicy(pin_memory=self.engine.device.type != "cpu")
        with self._on_device(own):
            fully_shard(
                module,
                mesh=mesh,
                # What the inputs are cast to is left to autocast: a float input may be a target or a position.
                mp_policy=MixedPrecisionPolicy(self._lowered, self._reduced, cast_forward_inputs=False),
                offload_policy=offload,
                ignored_params=set(module.parameters()) - set(own),
                reshard_after_forward=self.plan.is_resharded_after_forward(unit),
            )
        if experts is not None:
            different = self.engine.mesh.size(Role.EXPERT)
            expert_parallel.finish(module, unit.parameters, self.engine.parameter_mesh, different)
        _keep_class_name(module)

    def _take_over_groups(self) -> None:
        from torchacc.engines.native import shard_updates

        shard_updates.install()
        units = [self._module_of(unit) for unit in self._own_plan.units]
        is_split, float8 = self.engine.mesh.size(Role.SHARD) > 1, self.plan.float8
        gathered = float8.weights if float8 is not None and float8.are_gathered else ()
        self._groups = self._groups_class(
            self._root,
            units,
            self._agree,
            is_split,
            float8=[self.model.get_parameter(name) for name in gathered],
            shard_group=self.engine.device_mesh.get_group(Role.SHARD.value) if is_split else None,
            status=self.status,
        )

    @property
    def _groups_class(self) -> "type[FSDPGroups]":
        from torchacc.engines.native.fsdp_groups import FSDPGroups

        return FSDPGroups

    @property
    def _agree(self) -> Callable[[Sequence[int]], list[int]] | None:
        """Returns the largest of numbers of the processes that have the same units; None where there is one."""
        return self.engine.group.all_reduce_max if self.engine.job.launched else None

    def _set_prefetch(self) -> None:
        modules: dict[str, Any] = {unit.name: self._module_of(unit) for unit in self._own_plan.units}
        for name, following in self._own_plan.prefetched_in_forward.items():
            modules[name].set_modules_to_forward_prefetch([modules[following]])
        if not self.plan.backward_prefetch:
            for module in modules.values():
                # Where nothing is named FSDP2 gathers the next unit. This one is unsharded by then: it ends there.
                module.set_modules_to_backward_prefetch([module])

    @contextmanager
    def _on_device(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context manager with full parameters on the device, contiguous, while fully_shard() cuts them."""
        parameters = [parameter for parameter in parameters if not hasattr(parameter, "to_local")]  # DTensors are there
        before = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.to(self.engine.device).contiguous()
        try:
            yield
        finally:
            for parameter, data in zip(parameters, before, strict=True):
                parameter.data = data

    @cached_property
    def _has_scalar_parameters(self) -> bool:
        """Whether the model has parameters without dimensions."""
        return any(not planned.shape for planned in self.plan.parameters)

    @property
    def _lowered(self) -> torch.dtype | None:
        return None if self.plan.compute_dtype == "float32" else getattr(torch, self.plan.compute_dtype)

    @property
    def _reduced(self) -> torch.dtype | None:
        """The dtype of gradients between devices; None where they have it already, or are in float64."""
        if self._lowered is None and self.plan.reduce_dtype == "float32":
            return None
        return getattr(torch, self.plan.reduce_dtype)  # type: ignore[no-any-return]

    def _run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's forward in the compute dtype, and give its scalars their means over all devices."""
        from torchacc.engines.native.outputs import let_pytree_see, with_full_scalars

        device = self.engine.device.type
        if self.plan.tensor_parallel.size > 1 and any(module.training for module in self.model.modules()):
            split_layers.agree_on_random_numbers(self.engine.device, self.engine.tp_mesh)
        with ExitStack() as stack:
            stack.enter_context(autocast_to(self._lowered, device))
            if self.plan.activations_on_host and device != "cpu":
                stack.enter_context(SaveActivationsOnHost())
            if self._compiled is not None:
                kwargs = self._compiled.without_cache(kwargs)
                stack.enter_context(self._compiled.of_call(kwargs))
            stack.enter_context(script_reads.inside())
            stack.enter_context(self._groups.ending_interrupted())
            output = inner(*args, **kwargs)
        let_pytree_see(output)
        if self._has_scalar_parameters:
            if torch.is_grad_enabled():
                scalar_parameters.check_used_alike(self.model, self.plan, self.engine.group)
            output = with_full_scalars(output)
        return average_scalars(output, self.engine.group.all_reduce_mean) if self._losses_differ else output

    @property
    def _losses_differ(self) -> bool:
        """Whether processes may have other losses than each other."""
        return self.engine.job.launched

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`."""
        norm = super().clip_grad_norm_(max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # where PyTorch's own norm was taken

    def _before_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what an optimizer cannot do with shards, and say what it does slowly."""
        optimizer_checks.check(self, optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer, *, makes_gradients: bool = False) -> bool:
        """Make an optimizer of this model ready for its next step."""
        if self._steps is not None:
            self._steps.on_step(optimizer, has_closure=makes_gradients)
        self._fuse_if_compiled(optimizer)  # each time, as groups are added
        is_among_first = super().before_step(optimizer, makes_gradients=makes_gradients)
        script_reads.begin()
        return is_among_first

    def _fuse_if_compiled(self, optimizer: torch.optim.Optimizer) -> None:
        """Switch a compiled model's optimizer to one kernel for all parameters of a group."""
        if self._compiled is not None and self.plan.compute_dtype != "float16" and fuse(optimizer, self.engine.device):
            name = type(optimizer).__name__
            _log.info(
                "%s updates the parameters of each group together, as %s(…, fused=True) does, since "
                "config.compute.compile is set; pass fused=False to keep its loop",
                *[name] * 2,
            )

    def with_mean_loss(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose loss is the mean over all devices, by which each takes the same decisions."""
        return mean_of_closure(closure, self.engine.group.all_reduce_mean) if self.engine.job.launched else closure

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Bump the weights' versions, which fused optimizers do not do; warn of what was compiled again."""
        script_reads.end()
        fused = (group["params"] for group in optimizer.param_groups if group.get("fused"))
        increment_version([each for group in fused for each in group if each.grad is not None])
        if self._compiled is not None:
            compiled_units.watch.after_step(optimizer)

    def on_unscale(self) -> None:
        """Record that PyTorch's own `GradScaler` unscales gradients; refuse it where they are gone."""
        self.status.refuse_gradients("a GradScaler")
        super().on_unscale()

    def _drop_window(self) -> None:
        self._groups.drop_gradients()

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        """Keep full gradients until the first backward outside of the context reduces their sum."""
        with self._groups.holding_gradients():
            yield


def _refuse_without_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise ConfigError(
                f"the parameter {name!r} is of {parameter.dtype}, which FSDP2 does not shard: keep its parts as a real "
                "parameter, and compute with torch.view_as_complex(parameter); or set "
                "config.dist.fsdp.sharding_strategy = 'NO_SHARD', with which it stays as it is"
            )
        if not parameter.is_floating_point():
            raise ConfigError(
                f"the parameter {name!r} is of {parameter.dtype}, and FSDP2 shards only what may have a gradient: keep "
                "it as a buffer (register_buffer)"
            )


def _keep_class_name(module: nn.Module) -> None:
    """Give the subclass that FSDP2 makes the name of the class, by which libraries look models up."""
    made, own = type(module).__mro__[0], type(module).__mro__[2]  # between them lies FSDPModule
    made.__name__, made.__qualname__, made.__module__ = own.__name__, own.__qualname__, own.__module__
