"""The interface of an engine, which starts a runtime, shards models by a plan, and moves batches to the devices."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from torchacc.engines import attention_kernels
from torchacc.engines.compile_report import CompileReport
from torchacc.engines.memory import Memory, memory_of_process
from torchacc.engines.process_group import ProcessGroup
from torchacc.engines.sample_rows import SampleGatherer
from torchacc.env import Job
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.plan import ShardingPlan

if TYPE_CHECKING:
    from torchacc.config import Config
    from torchacc.engines.sharded_model import ShardedModel

NO_GPU = {
    "memory.gpu_fraction": "there is no NVIDIA GPU here",
    "memory.gpu_preallocate": "there is no NVIDIA GPU here",
}
"""Options that mean nothing without a GPU."""


class Engine(ABC):
    """A runtime that carries sharding out. It belongs to the process once `setup()` has run."""

    name: ClassVar[str]
    """The engine's name, as users see it."""
    is_lazy: ClassVar[bool] = False
    """Whether operations are recorded, and run together at `sync()`, as PyTorch's lazy tensors are."""
    drives_all_devices: ClassVar[bool] = False
    """Whether the engine is SPMD: one program runs on all devices, and each process drives those of its host."""
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

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Refuse what is handed to `accelerate()` with the model where the config cannot be had with it.

        Raises:
            ConfigError: It cannot.
        """

    @abstractmethod
    def setup(self, plan: ShardingPlan) -> None:
        """Start the runtime and the process group, for a model with this plan. Collective: every process."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that models and batches live on."""

    @property
    def num_batch_devices(self) -> int:
        """Number of data-parallel devices whose samples are in the batch that a model is called with."""
        return len(self.data_parallel_ranks)

    @property
    def data_parallel_ranks(self) -> Sequence[int]:
        """The data-parallel devices, by index, that this process feeds: the one at its rank, where it drives one."""
        shard = self.mesh.data_parallel_rank(self.job.rank)
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
    def to_device(self, batch: Any) -> Any:
        """Move a host batch, of any nesting, to this process's devices."""

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return copies of tensors on the host; None where some are not there yet, or have no values."""
        return None if any(tensor.is_meta for tensor in tensors) else [tensor.cpu() for tensor in tensors]

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the samples of all data-parallel devices. Collective; see `torchacc.dist.all_gather()`."""
        return self._sample_gatherer(tensor)

    @cached_property
    def _sample_gatherer(self) -> SampleGatherer:
        """Gathers samples between processes. Made by a collective: every process."""
        return SampleGatherer(self.group, self.mesh)

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
