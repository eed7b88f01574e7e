"""The interface of an engine, which starts a runtime, shards models by a plan, and moves batches to the devices."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.utils.clip_grad import clip_grad_norm_

from torchacc.chunked_loss.model_loss import ModelLoss
from torchacc.data.tree import map_tensors
from torchacc.engines import attention_kernels
from torchacc.engines.compile_report import CompileReport
from torchacc.engines.device_losses import warn_of_sums
from torchacc.engines.first_steps import FirstSteps
from torchacc.engines.forward_inputs import InputMover, explain, takes_half
from torchacc.engines.full_precision import returns_float32
from torchacc.engines.held_parameters import HeldParameters
from torchacc.engines.initial_values import is_without_weights
from torchacc.engines.memory import Memory, memory_of_process
from torchacc.engines.optimizers import remap_optimizer
from torchacc.engines.patches.expert_balance import balanced_over_devices, modules_with_balance
from torchacc.engines.process_group import ProcessGroup
from torchacc.engines.sample_rows import HostRowGatherer, RowGatherer
from torchacc.engines.status import ModelStatus
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError
from torchacc.launch import progress
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import ShardingPlan
from torchacc.parallel.sharding import LocalShard, ShardPlacement

if TYPE_CHECKING:
    from torchacc.config import Config

NO_GPU = {
    "memory.gpu_fraction": "there is no NVIDIA GPU here",
    "memory.gpu_preallocate": "there is no NVIDIA GPU here",
}
"""Options that mean nothing without a GPU."""

HANDLE = "_torchacc"
"""The attribute by which a sharded model, and each of its parameters, knows its `ShardedModel`."""


class Engine(ABC):
    """A runtime that carries sharding out. It belongs to the process once `setup()` has run."""

    name: ClassVar[str]
    """The engine's name, as users see it."""
    is_lazy: ClassVar[bool] = False
    """Whether operations are recorded, and run together at `sync()`, as PyTorch's lazy tensors are."""
    drives_all_devices: ClassVar[bool] = False
    """Whether one process drives all devices of a machine, and not each process one."""
    no_effect: ClassVar[Mapping[str, str]] = {}
    """Options that mean nothing here: dotted path -> why. One that the user changed is listed in a log line."""

    def __init__(self, *, config: "Config", mesh: Mesh, job: Job) -> None:
        self.config = config
        self.mesh = mesh
        self.job = job
        self.group = ProcessGroup(job)
        self.logged_loaders: set[str] = set()
        """The descriptions of its loaders that have been logged."""

    def options_without_effect(self) -> Mapping[str, str]:
        """Return `no_effect`, and what means nothing on the devices that this machine has."""
        return self.no_effect

    @classmethod
    @abstractmethod
    def count_devices(cls, config: "Config", job: Job) -> int:
        """Return the number of devices that this job has, on all machines."""

    @classmethod
    def check_devices(cls) -> None:
        """Refuse this machine's devices where the engine cannot use them. Nothing is started, or imported.

        Raises:
            ConfigError: It cannot.
        """

    @classmethod
    @abstractmethod
    def runs_on_cpu(cls) -> bool:
        """Return whether the devices are this machine's CPU, so that there are as many as a job has processes."""

    @classmethod
    @abstractmethod
    def find_devices(cls) -> str:
        """Return what this engine would run on here, in words. Starts the runtime, so that it needs its own process.

        Raises:
            ConfigError: What is installed does not fit.
            EngineError: The runtime cannot start.
        """

    def check(self, model: nn.Module) -> None:
        """Refuse what this engine cannot do for a model, before anything is started.

        Raises:
            ConfigError: It cannot.
        """
        attention_kernels.check_model(self.config, model)

    @abstractmethod
    def setup(self, plan: ShardingPlan) -> None:
        """Start the runtime and the process group, for a model with this plan. Collective: every process."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that models and batches live on."""

    @property
    def data_shards(self) -> range:
        """The data-parallel devices, by index, that this process feeds: the one at its rank, where it drives one."""
        shard = self.mesh.data_shard(self.job.rank)
        return range(shard, shard + 1)

    @abstractmethod
    def apply(self, model: nn.Module, plan: ShardingPlan, optimizer: torch.optim.Optimizer | None) -> "ShardedModel":
        """Shard a model in place by its plan. Collective: every process.

        Args:
            model: The user's model, on the CPU or on `device`.
            plan: The plan made for it.
            optimizer: An optimizer that already holds the model's parameters; its groups and state move to the shards.
        """

    @abstractmethod
    def put(self, batch: Any) -> Any:
        """Move a host batch, of any nesting, to this process's devices."""

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return copies of tensors on the host; None where some are not there yet, or have no values."""
        return None if any(tensor.is_meta for tensor in tensors) else [tensor.cpu() for tensor in tensors]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all data-parallel devices. Collective: every process; see `torchacc.dist.all_gather()`."""
        return self.row_gatherer(tensor)

    @cached_property
    def row_gatherer(self) -> RowGatherer:
        """The collectives of rows between processes. Made by a collective: every process."""
        return HostRowGatherer(self.group, self.mesh)

    def with_whole_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of which each device computes whole rows, where a compiler would choose what it computes."""
        return tensor

    def sync(self) -> None:
        """Run what has been recorded so far, where an engine records at all."""

    def end_batch(self) -> None:
        """Run what the last batch has left recorded; the loader calls it between batches."""

    def seed(self, seed: int) -> None:
        """Seed PyTorch's and the device's generators; each process then draws other numbers."""
        torch.manual_seed(seed + self.job.rank)

    def random_state(self) -> dict[str, Any]:
        """Return the state of this process's generators of random numbers, PyTorch's and the device's."""
        return {"torch": torch.get_rng_state()}

    def check_random_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what `set_random_state()` would not take, and change nothing.

        Raises:
            Exception: What PyTorch's generators raise; a KeyError, TypeError or ValueError for the engine's own.
        """
        torch.Generator().set_state(state["torch"])

    def set_random_state(self, state: Mapping[str, Any]) -> None:
        """Put PyTorch's and the device's generators where they were; takes what `random_state()` returned."""
        torch.set_rng_state(state["torch"])

    def compile_report(self) -> CompileReport:
        """Return what has been compiled in this process so far."""
        return CompileReport()

    def read_scalars(self, scalars: Sequence[torch.Tensor]) -> list[float]:
        """Return the values of tensors without dimensions, in one transfer, once the devices have computed them."""
        if not scalars:
            return []
        device = scalars[0].device
        values: list[float] = torch.stack([scalar.detach().to(device, torch.float32) for scalar in scalars]).tolist()
        return values

    def memory(self) -> Memory | None:
        """Return the most memory that was in use so far; None where that is not known."""
        return memory_of_process()

    def device_name(self) -> str:
        """Return what this process's devices are, as their vendor names them; only once `setup()` has run."""
        return "CPU"


class ShardedModel(ABC):
    """A model that an engine has sharded, with the operations that need more than the module."""

    def __init__(self, engine: Engine, model: nn.Module, plan: ShardingPlan) -> None:
        self.engine = engine
        self.model = model
        self.plan = plan
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
            remap_optimizer(optimizer, shards, lambda original, full: self._shard_state(shards[original], full))

    @abstractmethod
    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Move the model to the device, shard its units, and call `_install_forward()`.

        Args:
            optimizer: Whose groups flattened parameters go by.

        Returns:
            Original parameter -> the parameter that takes its place; the same one where it stays.
        """

    @abstractmethod
    def _shard_state(self, shard: nn.Parameter, full: torch.Tensor) -> torch.Tensor:
        """Return what this process holds of an optimizer's tensor for a parameter; its shape is the original's."""

    @cached_property
    def local_shards(self) -> dict[nn.Parameter, LocalShard]:
        """What this process holds of each parameter that an optimizer sees."""
        return dict(self._local_shards())

    @abstractmethod
    def _local_shards(self) -> Iterator[tuple[nn.Parameter, LocalShard]]: ...

    def check_call(self) -> None:
        """Check that the model can be called here.

        Raises:
            EngineError: It has no weights yet, or is called inside of a transform of torch.func.
        """
        self.status.check_usable()
        if torch._C._functorch.peek_interpreter_stack() is not None and not self.plan.is_plain:
            raise EngineError(
                "a sharded model cannot run inside of a transform of torch.func (grad, jvp, jacrev, vmap …), which "
                "cannot follow where weights are gathered: take torch.autograd.grad(), or transform a copy of the "
                "model that is not sharded, with torchacc.full_state_dict(model) loaded"
            )

    def check_parameters(self) -> None:
        """Check that the model has the parameters that were sharded, before their values are handed out.

        Raises:
            EngineError: The script has put another one in the place of one, or given it another shape.
        """
        self.held_parameters.check()

    @functools.cached_property
    def held_parameters(self) -> HeldParameters:
        """The parameters that the model has when this is first asked for, which is when it has been sharded."""
        return HeldParameters(self.model)

    @abstractmethod
    def fetch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what this process holds of tensors that are sharded like parameters, on the host.

        Returns:
            For each a tensor of one dimension, padding included or left out; it may share memory with the model.
        """

    @abstractmethod
    def place(self, parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor that is sharded like a parameter.

        Args:
            parameter: One of `local_shards`.
            local: What this process is to hold of it: a host tensor of one dimension, any dtype, and as many elements
                as its pieces have.
        """

    def assign(self, parameter: nn.Parameter, local: torch.Tensor) -> None:
        """Give a parameter new values; the arguments are those of `place()`."""
        parameter.copy_(self.place(parameter, local))

    @cached_property
    def placement(self) -> ShardPlacement:
        """Which shards this process holds; all of them where one process drives all devices."""
        return ShardPlacement()

    def replica_of(self, local_shard: LocalShard) -> tuple[int, int]:
        """Return which copy of a parameter's shard this process holds, and how many there are."""
        return self.placement.replica, self.placement.num_replicas

    def gather(self, local_shard: LocalShard, local: torch.Tensor, *, rank0_only: bool) -> torch.Tensor | None:
        """Return the full tensors of a parameter from its shards, flat, on the host. Collective: every process.

        Args:
            local_shard: The parameter's.
            local: What `fetch()` gave.
            rank0_only: Whether other processes than rank 0 get None, and need no memory for them.
        """
        if self.placement.processes_per_replica == 1:
            return None if rank0_only and self.engine.job.rank else local[: local_shard.numel].clone()
        padded = local if len(local) == local_shard.shard_numel else local.new_zeros(local_shard.shard_numel)
        padded[: len(local)] = local
        found = self.engine.group.gather(padded, self._shard_group, rank0_only=rank0_only)
        return found if found is None else self._joined(local_shard, found)

    def _joined(self, local_shard: LocalShard, shards: torch.Tensor) -> torch.Tensor:
        """Return the full tensors from the shards of all processes of `_shard_group`, one after another."""
        return shards[: local_shard.numel]

    @cached_property
    def _shard_group(self) -> Any:
        return self.engine.group.own_subgroup(self.engine.mesh.groups(Role.PIPELINE, Role.SHARD, Role.TENSOR))

    @abstractmethod
    def local_numel(self) -> int:
        """Return the number of parameter elements that one device holds at rest, padding included."""

    @abstractmethod
    def _hold_gradients(self) -> AbstractContextManager[None]:
        """Return the engine's part of `accumulate()`."""

    def expect_all(self, call: str) -> None:
        """Wait until every process has come to a call that puts shards together. Collective: every process.

        Where each process has all of the model, nothing waits, and some may make the call by themselves.
        """
        if self.placement.processes_per_replica > 1:
            self.engine.group.expect_all(call)

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
        self.status.check_window("clip_grad_norm_()")
        if not self._has_clipped:  # on some processes only it would be so from the first step on
            self._has_clipped = True
            self.expect_all("model.clip_grad_norm_()")
        return clip_grad_norm_(self.model.parameters(), max_norm, norm_type)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold a context in which backward() adds to the gradients without making them ready for a step."""
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
        sees_a_part = self.engine.job.launched and self.engine.mesh.averages_gradients
        balances = modules_with_balance(model) if sees_a_part else []
        move = InputMover(self.engine.device, self.engine.put)
        if sees_a_part:
            self._first_steps = FirstSteps(model, self.engine.group.all_gather_objects, self.engine.copy_to_host)

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
                    warn_of_sums(model, output, (args, kwargs), self.engine.mesh.num_data_shards)
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
        loss = ModelLoss(self.model, option, num_devices=len(self.engine.data_shards), after=self._after)
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

    def before_step(self, optimizer: torch.optim.Optimizer, *, makes_gradients: bool = False) -> None:
        """Make an optimizer of this model ready for its next step.

        Args:
            optimizer: The optimizer.
            makes_gradients: Whether the step calls a closure, which computes the gradients.

        Raises:
            EngineError: The gradients are those of an accumulation window that was not completed, or the weights or the
                state were not loaded as a whole.
        """
        self.status.check_usable()
        self.status.check_optimizer(optimizer)
        self.status.check_window("optimizer.step()")
        if self._first_steps is not None and self._first_steps.compare():
            self._first_steps = None
        if optimizer not in self._prepared:
            self._before_first_step(optimizer)
            self._watch_zero_grad(optimizer)
            self._prepared.add(optimizer)

    @property
    def is_in_first_steps(self) -> bool:
        """Whether what the processes train with is compared before the next step."""
        return self._first_steps is not None

    def with_mean_loss(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of an optimizer's step with the loss of all devices, where it computes one device's."""
        return closure

    def _before_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare an optimizer for its first step, or refuse it."""

    def on_unscale(self) -> None:
        """Note that PyTorch's own `GradScaler` is about to unscale the gradients of one of this model's optimizers."""
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
        first = ", the first of its tuple" if isinstance(model, tuple) else ""
        raise ConfigError(
            f"this {type(model).__name__} was not sharded: pass the model that accelerate() returned{first}"
        )
    return sharded  # type: ignore[no-any-return]
