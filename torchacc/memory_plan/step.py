"""One training step of a model, studied once, and what it needs for any strategy and number of devices."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchacc.config import Config, resolve
from torchacc.config.names import nearest
from torchacc.env import Job
from torchacc.errors import ConfigError, shown
from torchacc.memory_plan.lifetimes import Lifetimes, eager_lifetimes, fused_lifetimes
from torchacc.memory_plan.strategies import DeviceBytes, native_bytes, xla_bytes
from torchacc.memory_plan.trace import Trace, record
from torchacc.parallel.mesh import STRATEGIES, from_config
from torchacc.parallel.plan import ShardingPlan, make_plan

MOST_DEVICES = 1024
"""How far `Step.smallest()` looks."""
_NOT_PLANNED = (
    "memory.offload_activations",
    "dist.fsdp.cpu_offload",
    "compute.scan_layers",
    "compute.fp16",
    "compute.fp8",
)


@dataclass(frozen=True)
class PlannedBackend:
    """How the engines of a backend run a step."""

    runs_eagerly: bool
    lifetimes: Callable[[Trace], Lifetimes]
    count: Callable[[ShardingPlan, Lifetimes, int, int], DeviceBytes]


PLANNED_BACKENDS: Mapping[str, PlannedBackend] = {
    "xla": PlannedBackend(False, fused_lifetimes, xla_bytes),
    "native": PlannedBackend(True, eager_lifetimes, native_bytes),
}
"""What can be planned, by the names of `config.backend`."""


@dataclass(frozen=True)
class Step:
    """What is known of a training step, for any number of devices."""

    plan: ShardingPlan
    """On one device."""
    lifetimes: Lifetimes
    num_states: int
    """Tensors in a parameter's shape that the optimizer keeps for it."""
    batch_bytes: int
    backend: PlannedBackend

    def on(self, num_devices: int, strategy: str, *, replicas: int = 1) -> DeviceBytes:
        """Return what each device needs.

        Args:
            num_devices: All devices.
            strategy: A sharding strategy.
            replicas: How many copies of the model there are, `config.dist.dp.size`.

        Raises:
            ConfigError: The strategy cannot be had on so many devices.
        """
        if num_devices % replicas:
            raise ConfigError(
                f"{num_devices} devices cannot hold {replicas} replicas: choose a divisor of {num_devices}"
            )
        config = Config()
        config.dist.dp.size, config.dist.fsdp.size = replicas, num_devices // replicas
        config.dist.fsdp.sharding_strategy = strategy  # type: ignore[assignment]
        config = resolve(config, Job(num_processes=num_devices), num_devices=num_devices)
        again = STRATEGIES[strategy].reshard_after_forward
        plan = replace(self.plan, mesh=from_config(config), reshard_after_forward=again)
        return self.backend.count(plan, self.lifetimes, self.num_states, self.batch_bytes)

    def smallest(self, memory_bytes: int, strategy: str, *, replicas: int = 1) -> int | None:
        """Return the fewest devices, 1 to 8 or a multiple of 8, on which it fits; None where no number up to 1024 does.

        Args:
            memory_bytes: What each device has.
            strategy: A sharding strategy.
            replicas: How many copies of the model there are.
        """
        fewest = 2 * replicas if strategy == "HYBRID_SHARD" else replicas
        every = (*range(1, 9), *range(16, MOST_DEVICES + 1, 8))
        counts: list[int] = [n for n in every if n % replicas == 0 and n >= fewest]

        def fits(num_devices: int) -> bool:
            return self.on(num_devices, strategy, replicas=replicas).total <= memory_bytes

        bound = next((n for n in counts if (n <= 8 or n & (n - 1) == 0) and fits(n)), None)
        if bound is None or bound <= 8:
            return bound
        return min(n for n in counts if bound // 2 < n <= bound and fits(n))


def study(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    config: Config,
    *,
    num_states: int,
    backend: str = "xla",
    widens: bool = False,
) -> Step:
    """Run a training step on the meta device, and note what it takes.

    Not in a process that is to train on XLA later, which cannot start after another backward.

    Args:
        model: On the meta device, in training mode, with a `loss` among what it returns.
        batch: The batch of one device, on the meta device.
        config: Precision, units and recompute. How it is sharded is asked of the step.
        num_states: Tensors in a parameter's shape that the optimizer keeps for it; `count_states()` tells.
        backend: One of `PLANNED_BACKENDS`.
        widens: Whether the devices hold bfloat16 in float32, as XLA's CPU client does.

    Raises:
        ConfigError: The model cannot run there, or the config asks for what is not planned.
    """
    for path in _NOT_PLANNED:
        section, _, name = path.rpartition(".")
        if getattr(_section(config, section), name):
            raise ConfigError(f"config.{path} = True is not in the memory plan: leave it out to plan without it")
    if config.compute.chunked_loss and not PLANNED_BACKENDS[backend].runs_eagerly:
        raise ConfigError(
            "config.compute.chunked_loss is in the memory plan of the native engine only: leave it out, to plan without"
        )
    if config.memory.gc_policy != "full" and not PLANNED_BACKENDS[backend].runs_eagerly:
        raise ConfigError(
            f"config.memory.gc_policy = {config.memory.gc_policy!r} is in the memory plan of the native engine only: "
            "leave it at 'full', or plan for the native engine"
        )
    if config.dist.tp.size > 1:
        raise ConfigError(f"config.dist.tp.size = {config.dist.tp.size} is not in the memory plan: leave it at 1")
    if config.dist.ep.size > 1:
        raise ConfigError(f"config.dist.ep.size = {config.dist.ep.size} is not in the memory plan: leave it at 1")
    if config.dist.sp.size > 1:
        raise ConfigError(
            f"config.dist.sp.size = {config.dist.sp.size} is not in the memory plan: leave it at 1, with a batch of "
            "1/sp.size of the tokens"
        )
    if config.dist.pp.size > 1:
        raise ConfigError(
            f"config.dist.pp.size = {config.dist.pp.size} is not in the memory plan: leave it at 1, with a model of as "
            "many layers as a stage has"
        )
    config = deepcopy(config)
    config.dist.dp.size, config.dist.fsdp.size, config.dist.fsdp.sharding_strategy = 1, 1, "FULL_SHARD"
    config = resolve(config, Job(), num_devices=1)
    plan = make_plan(model, config, from_config(config))
    chosen = PLANNED_BACKENDS[backend]
    dtype = getattr(torch, plan.compute_dtype)
    trace = record(
        model,
        batch,
        dtype=dtype,
        recomputed=plan.recomputed,
        keeps_products=plan.keeps_products,
        eager=chosen.runs_eagerly,
        widens=widens,
        chunked_loss=config.compute.chunked_loss,
    )
    batch_bytes = sum(tensor.nbytes for tensor in (*batch.values(), *model.buffers()))
    return Step(plan, chosen.lifetimes(trace), num_states, batch_bytes, chosen)


def find_optimizer(name: str, option: str = "--optimizer") -> type[torch.optim.Optimizer]:
    """Return a class of `torch.optim` by its name, in upper or lower case: `adamw` is `AdamW`.

    Args:
        name: The name.
        option: What was given the name, for the message.

    Raises:
        ConfigError: There is none.
    """
    own = torch.optim.Optimizer
    found = (each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, own))
    classes = {each.__name__: each for each in found if each is not own}
    by_lower = {known.lower(): each for known, each in classes.items()}
    if name.lower() not in by_lower:
        raise ConfigError(f"{option} = {shown(name)}: torch.optim has no such optimizer; {nearest(name, classes)}")
    return by_lower[name.lower()]


def count_states(optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> int:
    """Return how many tensors in a parameter's shape an optimizer keeps for it.

    Args:
        optimizer: A class of `torch.optim`.
        options: Its arguments.

    Raises:
        ConfigError: It does not take them, or steps in another way.
    """
    parameter = nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros_like(parameter)
    try:
        made: Any = optimizer([parameter], **options)
        made.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the optimizer {optimizer.__name__} cannot be planned: {error}") from error
    return sum(
        isinstance(value, torch.Tensor) and value.shape == parameter.shape for value in made.state[parameter].values()
    )


def _section(config: Config, path: str) -> object:
    section: object = config
    for name in path.split("."):
        section = getattr(section, name)
    return section
