"""What an engine knows of a model that it has sharded: the interface by which scripts and checkpoints meet it."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.utils.clip_grad import clip_grad_norm_

from torchacc.chunked_loss.model_loss import ModelLoss
from torchacc.data.tree import map_tensors
from torchacc.engines import attention_kernels
from torchacc.engines.base import Engine
from torchacc.engines.device_losses import warn_of_sums
from torchacc.engines.first_steps import FirstSteps
from torchacc.engines.forward_inputs import InputMover, explain, takes_half
from torchacc.engines.full_precision import returns_float32
from torchacc.engines.held_parameters import HeldParameters
from torchacc.engines.initial_values import is_without_weights
from torchacc.engines.model_shards import ModelShards
from torchacc.engines.optimizers import remap_optimizer
from torchacc.engines.patches.expert_balance import balanced_over_devices, modules_with_balance
from torchacc.engines.status import ModelStatus
from torchacc.errors import ConfigError, EngineError
from torchacc.launch import progress
from torchacc.parallel.plan import ShardingPlan

HANDLE = "_torchacc"
"""The attribute by which a sharded model, and each of its parameters, knows its `ShardedModel`."""


class ShardedModel(ABC):
    """A model that an engine has sharded, with the operations that need more than the module."""

    def __init__(self, engine: Engine, model: nn.Module, plan: ShardingPlan) -> None:
        self.engine = engine
        self.model = model
        self.plan = plan
        self.all_names = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
        """Original names in the order of the modules', a tied parameter under each of its own."""
        self.parameter_names = tuple(name for name, _ in model.named_parameters())
        """Original names in the order of `named_parameters()`, a tied parameter under its first."""
        self.status = ModelStatus(has_weights=not is_without_weights(model))
        """What may be done with the model now."""
        self._has_looked_for_sums = False
        self._has_clipped = False
        self._came_in_half = {each.dtype for each in model.parameters()} & {torch.bfloat16, torch.float16}
        """The low precisions that the model's parameters came in."""
        self._first_steps: FirstSteps | None = None
        self._prepared: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Optimizers that have made a step."""

    def shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Shard the model in place. Collective: every process.

        Args:
            optimizer: An optimizer that already holds the model's parameters; its groups and state move to the shards.
        """
        shards = self._shard(optimizer)
        if optimizer is not None:
            remap_optimizer(optimizer, shards, lambda original, full: self.shards.place_full(shards[original], full))
        self._held_parameters = HeldParameters(self.model)

    @property
    @abstractmethod
    def shards(self) -> ModelShards:
        """What this process holds of the parameters, once they are sharded."""

    @abstractmethod
    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Move the model to the device, shard its units, and call `_install_forward()`.

        Args:
            optimizer: Whose groups flattened parameters go by.

        Returns:
            Original parameter -> the parameter that takes its place; the same one where it stays.
        """

    def check_call(self) -> None:
        """Check that the model can be called here.

        Raises:
            EngineError: It has no weights yet, or not the parameters that were sharded, or is called inside of a
                transform of torch.func.
        """
        self.status.check_usable()
        if torch._C._functorch.peek_interpreter_stack() is not None and not self.plan.is_replicated:
            raise EngineError(
                "a sharded model cannot run inside of a transform of torch.func (grad, jvp, jacrev, vmap …), which "
                "cannot follow where weights are gathered: take torch.autograd.grad(), or transform a copy of the "
                "model that is not sharded, with torchacc.full_state_dict(model) loaded"
            )
        if torch._C._current_graph_task_id() == -1:  # else the model is recomputed, and may show unsharded weights
            self._held_parameters.check()

    def check_parameters(self) -> None:
        """Check that the model has the parameters that were sharded, before their values are handed out.

        Raises:
            EngineError: The script has put another one in the place of one, or given it another shape.
        """
        self._held_parameters.check()

    @abstractmethod
    def _hold_gradients(self) -> AbstractContextManager[None]:
        """Return the engine's part of `accumulate()`."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients in place so that their global norm is at most `max_norm`. Collective: every process.

        Args:
            max_norm: The largest norm to allow.
            norm_type: The order of the norm; `inf` for the largest absolute value.

        Returns:
            The norm before clipping over all parameters of the unsharded model, a tensor without dimensions.

        Raises:
            EngineError: The gradients are those of an accumulation window that was not completed.
        """
        self.status.check_clipping("clip_grad_norm_()")
        self.expect_clipping("model.clip_grad_norm_()")
        return clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    def expect_clipping(self, call: str) -> None:
        """Wait, the first time, until every process clips: on some only it would be so from the first step on."""
        if not self._has_clipped:
            self._has_clipped = True
            self.shards.expect_all(call)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context manager in which backward() adds to the gradients without making them ready for a step."""
        with self.status.accumulating(), self._hold_gradients():
            yield

    def _install_forward(self, run: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
        """Replace the model's forward by one that calls `run`.

        Args:
            run: Called with the model's own forward, its positional and its keyword arguments; returns the output.
        """
        model = self.model
        attention_kernels.install(self.engine.config, model, self.plan.recomputed)
        inner = self._with_chunked_loss(model.forward)
        if self.plan.compute_dtype != "float32":
            inner = returns_float32(inner, getattr(torch, self.plan.compute_dtype))
        elif self._came_in_half:
            inner = takes_half(inner, self._came_in_half)
        has_own_rows = self.engine.job.launched and self.engine.mesh.averages_gradients
        sees_a_part = has_own_rows and not self.engine.drives_all_devices  # one program sees the rows of all hosts
        balances = modules_with_balance(model) if sees_a_part else []
        move = InputMover(self.engine.device, self.engine.to_device)
        if has_own_rows:
            self._first_steps = FirstSteps(
                model, self.engine.group.all_gather_objects, self.engine.copy_to_host, weighs_own=sees_a_part
            )

        @functools.wraps(inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            progress.mark(progress.Phase.FORWARD)
            if self._first_steps is not None and model.training and torch.is_grad_enabled():
                self._first_steps.see(args, kwargs)
            args, kwargs = move((args, kwargs))
            with balanced_over_devices(balances, self.engine.all_gather, self.engine.group):
                output = self._explaining(run, inner, args, kwargs)
            if torch.is_grad_enabled():
                if sees_a_part and model.training and not self._has_looked_for_sums:
                    self._has_looked_for_sums = True
                    warn_of_sums(model, output, (args, kwargs), self.engine.mesh.data_parallel_size)
                progress.mark(progress.Phase.BACKWARD)
                map_tensors(self._watch_backward, output)
            else:
                progress.mark(progress.Phase.EVALUATION)
            return output

        model.forward = forward
        self._watch_zero_grad(model)

    def _explaining(self, run: Callable[..., Any], inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model; say what is wrong with its inputs where only an operation inside says that something is."""
        try:
            return run(inner, args, kwargs)
        except (RuntimeError, ValueError) as error:
            explained = explain(error, (args, kwargs), self.engine.device, self.plan.compute_dtype)
            if explained is None:
                raise
            raise explained from error

    def _with_chunked_loss(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        option = self.engine.config.compute.chunked_loss
        if not option:
            return forward
        loss = ModelLoss(self.model, option, num_devices=self.engine.num_batch_devices, after=self._after)
        return functools.wraps(forward)(lambda *args, **kwargs: loss.run(forward, args, kwargs))

    def _after(self, tensor: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        """Return a tensor that waits for others, where an engine records what it runs."""
        return tensor

    def _watch_zero_grad(self, owner: nn.Module | torch.optim.Optimizer) -> None:
        """Wrap `zero_grad()`, so that `on_zero_grad()` runs before it."""
        zero_grad = owner.zero_grad

        @functools.wraps(zero_grad)
        def watched(*args: Any, **kwargs: Any) -> None:
            self.on_zero_grad(owner if isinstance(owner, torch.optim.Optimizer) else None)
            zero_grad(*args, **kwargs)

        owner.zero_grad = watched  # type: ignore[method-assign]

    def on_zero_grad(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Drop what an engine holds of gradients beside those of the parameters.

        Args:
            optimizer: Whose they are; None for all of the model's.

        Raises:
            EngineError: They are a part of those of an accumulation window, which can only be dropped together.
        """
        if self.status.has_incomplete_gradients:
            trained = [each for each in self.model.parameters() if each.requires_grad]
            if self.status.drop_gradients(optimizer, trained):
                self._drop_window()

    def _drop_window(self) -> None:
        """Forget the unreduced gradients of an accumulation window that was not completed."""

    def before_step(self, optimizer: torch.optim.Optimizer, *, makes_gradients: bool = False) -> bool:
        """Make an optimizer of this model ready for its next step.

        Args:
            optimizer: The optimizer.
            makes_gradients: Whether the step calls a closure, which computes the gradients.

        Returns:
            Whether this is one of the first steps, before which what the processes train with is compared.

        Raises:
            EngineError: The gradients are those of an accumulation window that was not completed, or the weights or the
                state were not loaded as a whole.
        """
        self.status.check_usable()
        self.status.check_optimizer(optimizer)
        if not makes_gradients:
            self.status.check_window("optimizer.step()")
        is_among_first = self._first_steps is not None
        if self._first_steps is not None and self._first_steps.compare():
            self._first_steps = None
        if optimizer not in self._prepared:
            self._before_first_step(optimizer)
            self._watch_zero_grad(optimizer)
            self._prepared.add(optimizer)
        return is_among_first

    def with_mean_loss(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of an optimizer's step with the loss of all devices, where it computes one device's."""
        return closure

    def _before_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer for its first step, or refuse it."""

    def on_unscale(self) -> None:
        """Record that PyTorch's own `GradScaler` is about to unscale gradients of one of this model's optimizers."""
        self.status.note_scaler()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what follows a step of an optimizer of this model."""

    def _watch_backward(self, output: torch.Tensor) -> torch.Tensor:
        def note(gradient: torch.Tensor) -> None:
            self.status.on_backward()

        if output.requires_grad:
            output.register_hook(note)
        return output


def sharded_model(model: nn.Module) -> ShardedModel:
    """Return what the engine knows of a model that it has sharded.

    Raises:
        ConfigError: The model was not sharded.
    """
    sharded = vars(model).get(HANDLE) if isinstance(model, nn.Module) else None
    if sharded is None:
        hint = ", the first of its tuple" if isinstance(model, tuple) else ""
        if isinstance(model, nn.Module) and any(hasattr(each, "to_local") for each in model.parameters()):
            hint = (
                ", of which this is a part. Adapters of peft are merged without torchacc: save them, open them beside "
                "their base, and call merge_and_unload() there"
            )
        raise ConfigError(
            f"this {type(model).__name__} was not sharded: pass the model that accelerate() returned{hint}"
        )
    return sharded  # type: ignore[no-any-return]
