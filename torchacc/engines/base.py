"""What an engine is: it starts a runtime, shards a model by a plan, and moves batches to the devices."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from torchacc.config import Config
from torchacc.engines.process_group import ProcessGroup
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError
from torchacc.plan import WrapPlan
from torchacc.topology import Topology


class Engine(ABC):
    """One way to carry out sharding; the process's runtime belongs to it once `setup()` has run."""

    kind: ClassVar[str]
    """The engine's name, as users see it."""
    no_effect: ClassVar[Mapping[str, str]] = {}
    """Options that mean nothing here: dotted path -> why. One that the user changed is listed in a log line."""

    def __init__(self, *, config: Config, topology: Topology, job: Job) -> None:
        self.config = config
        self.topology = topology
        self.job = job
        self.group = ProcessGroup(job)

    @classmethod
    @abstractmethod
    def count_devices(cls, config: Config, job: Job) -> int:
        """Return the number of devices that this job has, on all machines."""

    @abstractmethod
    def setup(self) -> None:
        """Start the runtime and the process group. Collective: every process."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that models and batches live on."""

    @property
    @abstractmethod
    def data_shards(self) -> range:
        """The data-parallel devices, by index, that this process feeds."""

    @abstractmethod
    def apply(self, model: nn.Module, plan: WrapPlan, optimizer: torch.optim.Optimizer | None) -> "ShardedModel":
        """Shard a model in place by its plan. Collective: every process.

        Args:
            model: The user's model, on the CPU or on `device`.
            plan: The plan made for it.
            optimizer: An optimizer that already holds the model's parameters; its groups and state move to the shards.
        """

    @abstractmethod
    def put(self, batch: Any) -> Any:
        """Move a host batch, of any nesting, to this process's devices."""

    def step_boundary(self) -> None:
        """Run what has been recorded so far, where an engine records at all."""

    def compile_stats(self) -> tuple[int, float]:
        """Return how many programs have been compiled in this process, and in how many seconds."""
        return 0, 0.0


class ShardedModel(ABC):
    """What an engine knows of one model that it has sharded: the operations that need more than the module."""

    def __init__(self, engine: Engine, model: nn.Module, plan: WrapPlan) -> None:
        self.engine = engine
        self.model = model
        self.plan = plan
        self._accumulating = False
        self._window_is_open = False

    @abstractmethod
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients in place so that their global norm is at most `max_norm`. Collective: every process.

        Args:
            max_norm: The largest norm to allow.
            norm_type: The order of the norm; `inf` for the largest absolute value.

        Returns:
            The norm before clipping over all parameters of the unsharded model, a tensor without dimensions.
        """

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold a context in which backward() adds to the gradients without making them ready for a step."""
        self._accumulating = True
        try:
            with self._hold_gradients():
                yield
        finally:
            self._accumulating = False

    @abstractmethod
    def _hold_gradients(self) -> AbstractContextManager[None]:
        """Return the engine's part of `accumulate()`."""

    @abstractmethod
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the unsharded parameters and buffers on the CPU, by original name. Collective: every process."""

    @abstractmethod
    def local_numel(self) -> int:
        """Return the number of parameter elements that one device holds at rest, padding included."""

    def before_forward(self) -> None:
        """Note whether the pass that begins completes the accumulation window."""
        if torch.is_grad_enabled():
            self._window_is_open = self._accumulating

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer of this model ready for its next step.

        Raises:
            EngineError: The gradients are those of an accumulation window that was not completed.
        """
        if self._window_is_open:
            raise EngineError(
                "optimizer.step() after a backward inside of torchacc.accumulate(): the gradients are not reduced over "
                "the devices yet. Leave the last micro-batch of each window outside of the context"
            )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do what follows a step of an optimizer of this model."""


def wrap_forward(model: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a model's forward, on this one object and with its signature kept."""
    inner = model.forward
    model.forward = functools.wraps(inner)(around(inner))


def average_scalars(output: Any, mean: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Give the scalars that a model returns the values of their means over all devices.

    These are its floating-point tensors without dimensions: the output itself, or an entry of the mapping, tuple or
    dataclass that it is.

    Args:
        output: The model's output.
        mean: Averages a tensor of shape (scalars,), in float64, over the devices.
    """
    scalars: list[torch.Tensor] = []

    def note(scalar: torch.Tensor) -> torch.Tensor:
        scalars.append(scalar)
        return scalar

    _map_scalars(output, note)
    if not scalars:
        return output
    means = iter(mean(torch.stack([scalar.detach().double() for scalar in scalars])))
    return _map_scalars(output, lambda scalar: MeanLoss.apply(scalar, next(means)))


def _map_scalars(output: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    def at(value: Any) -> Any:
        is_scalar = isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
        return fn(value) if is_scalar else value

    if isinstance(output, MutableMapping):
        for key in list(output):
            output[key] = at(output[key])
        return output
    if isinstance(output, tuple):
        values = map(at, output)
        return type(output)(*values) if hasattr(output, "_fields") else tuple(values)
    if is_dataclass(output) and not isinstance(output, type):
        return replace(output, **{name: at(value) for name, value in vars(output).items()})
    return at(output)


class MeanLoss(torch.autograd.Function):
    """Give a loss the value of its mean over all devices, and its own gradient.

    The gradients are averaged over the devices as well, so that they are those of the mean.
    """

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the mean in place of the device's own loss."""
        return mean.to(loss.dtype).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Pass the gradient on to the device's own loss."""
        return grad, None


def remap_optimizer(
    optimizer: torch.optim.Optimizer,
    shards: Mapping[torch.Tensor, nn.Parameter],
    shard_state: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Let an optimizer that was made before sharding hold the shards, in the same groups.

    Args:
        optimizer: The optimizer; its state, if it has any, is sharded too.
        shards: Original parameter -> the parameter that replaced it. Several may share one flat parameter.
        shard_state: Turns a state tensor of the original parameter's shape into that of its shard.

    Raises:
        ConfigError: The optimizer has state and parameters were flattened, so that the state has no place.
    """
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = list(dict.fromkeys(shards.get(parameter, parameter) for parameter in group["params"]))
    flattened = len(set(shards.values())) < len(shards)
    for parameter, entries in state.items():
        if entries and flattened:
            raise ConfigError(
                "the optimizer already has state, which cannot be moved to flattened parameters: hand in an optimizer "
                "that has made no step, or set config.dist.fsdp.flatten_parameters = False"
            )
        same_shape = {k for k, v in entries.items() if torch.is_tensor(v) and v.shape == parameter.shape and v.dim()}
        optimizer.state[shards.get(parameter, parameter)] = {
            key: shard_state(parameter, value) if key in same_shape else value for key, value in entries.items()
        }
