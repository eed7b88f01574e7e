"""The processes of the job on the host: started once, used for everything that is not a gradient on a device."""

import atexit
import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchacc import env
from torchacc.engines.expected_calls import tell_end, wait_for_all
from torchacc.engines.gloo import drain_at_exit, gloo_silenced
from torchacc.env import Job
from torchacc.errors import CheckpointError, ConfigError, DataError, EngineError

_T = TypeVar("_T")

_MEET_SECS = 300
"""How long a process that reads a sharded parameter waits for the others to do the same."""
_MEET_BYTES = 256
_OURS = (CheckpointError, ConfigError, DataError, EngineError)


def accelerator_kind() -> str | None:
    """Return the type of PyTorch's accelerator on this machine, such as `cuda`; None where it has none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def sees_own_device_alone() -> bool:
    """Return whether a scheduler shows each process one device, as `srun --gpus-per-task=1`; a launcher shows all."""
    return torch.accelerator.device_count() == 1 and env.scheduler() is not None


class ProcessGroup:
    """The job's processes. With one process every operation is the identity."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def start(self) -> None:
        """Start torch.distributed unless the user has. Collective: every process.

        Host tensors travel over gloo, those of PyTorch's accelerator, where there is one, over its own backend.
        """
        if dist.is_initialized():
            if dist.get_world_size() != self.job.num_processes:
                raise EngineError(
                    f"torch.distributed runs with {dist.get_world_size()} processes, but the launcher's WORLD_SIZE is "
                    f"{self.job.num_processes}: leave init_process_group() to accelerate(), or start with `torchrun`"
                )
            backends = str(dist.get_backend_config())
            if "cpu:" not in backends:
                raise EngineError(
                    f"torch.distributed runs with the backends {backends!r}, of which none is for tensors of the host: "
                    "leave init_process_group() to accelerate(), or call it with 'cpu:gloo,cuda:nccl'; with Ray Train, "
                    "pass torch_config=TorchConfig(backend='cpu:gloo,cuda:nccl') to the TorchTrainer"
                )
            drain_at_exit()
            return
        backend = "gloo"
        if kind := accelerator_kind():
            backend = f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"
        with gloo_silenced():
            if self.job.launched:
                env.set_meeting_point()
                dist.init_process_group(backend, rank=self.job.rank, world_size=self.job.num_processes)
            else:
                dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        atexit.register(_stop)
        drain_at_exit()

    def own_subgroup(self, groups: Sequence[Sequence[int]], copy: int = 0) -> dist.ProcessGroup | None:
        """Return this process's group of those of a mesh axis; None where it is alone in it.

        Collective: every process. A group takes sockets and threads that wake up a hundred times a second, so that all
        models share it, and a call waits for its collectives.

        Args:
            groups: The processes of each group.
            copy: Which of several groups of the same processes, whose operations do not wait for one another.
        """
        return _own_subgroup(dist.group.WORLD, self.job.rank, tuple(map(tuple, groups)), copy)

    def device_mesh(self, device_type: str, sizes: Mapping[str, int], ranks: Sequence[int]) -> Any:
        """Return the DeviceMesh of all processes, which models of one layout share, as they do groups.

        Collective: every process.

        Args:
            device_type: `cuda`, `cpu` and so on.
            sizes: The size of each dimension, by its name.
            ranks: The processes, the last dimension's beside each other.
        """
        return _device_mesh(dist.group.WORLD, device_type, tuple(sizes.items()), tuple(ranks))

    def all_gather_objects(self, payload: Any) -> list[Any]:
        """Return every process's payload, by rank. Collective: every process."""
        if not self.job.launched:
            return [payload]
        self.start()
        payloads: list[Any] = [None] * self.job.num_processes
        dist.all_gather_object(payloads, payload)
        return payloads

    def broadcast_object(self, payload: Any) -> Any:
        """Return rank 0's payload. Collective: every process."""
        if not self.job.launched:
            return payload
        self.start()
        box = [payload]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, in place of a contiguous one of the same shape. Collective: every process."""
        if self.job.launched:
            dist.broadcast(tensor, src=0)
        return tensor

    def gather(self, shard: torch.Tensor, group: dist.ProcessGroup | None, *, rank0_only: bool) -> torch.Tensor | None:
        """Return the shards of a subgroup, one after another. Collective: every process of the subgroup.

        Args:
            shard: A host tensor of one dimension, of the same size on every process.
            group: Of `own_subgroup()`; None for all processes.
            rank0_only: Whether only the job's rank 0 gets them; the others, and all of other subgroups, get None.
        """
        if not rank0_only:
            gathered = shard.new_empty(dist.get_world_size(group) * shard.numel())
            dist.all_gather_into_tensor(gathered, shard, group=group)
            return gathered
        if group is not None and dist.get_global_rank(group, 0) != 0:
            return None
        full = shard.new_empty(dist.get_world_size(group), shard.numel()) if self.job.rank == 0 else None
        dist.gather(shard, None if full is None else list(full), dst=0, group=group)
        return None if full is None else full.view(-1)

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes. Collective: every process."""
        if not self.job.launched:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total

    def all_reduce_mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all processes. Collective: every process."""
        return self.all_reduce_sum(value) / self.job.num_processes if self.job.launched else value

    def all_reduce_max(self, numbers: Sequence[int], group: dist.ProcessGroup | None = None) -> list[int]:
        """Return the largest that any process has of each number. Collective: every process, with as many.

        Args:
            numbers: This process's.
            group: Of `own_subgroup()`; None for all processes.
        """
        return self.begin_all_reduce_max(numbers, group)()

    def begin_all_reduce_max(
        self, numbers: Sequence[int], group: dist.ProcessGroup | None = None
    ) -> Callable[[], list[int]]:
        """Begin an `all_reduce_max()`; return what waits for it and returns its result."""
        found = torch.tensor(numbers, dtype=torch.int64)
        work = None
        if self.job.launched and numbers:
            work = dist.all_reduce(found, dist.ReduceOp.MAX, group=group, async_op=True)

        def result() -> list[int]:
            if work is not None:
                work.wait()
            return found.tolist()

        return result

    def expect_all(self, call: str) -> None:
        """Wait until every process has come to the same call, before it begins. Collective: every process.

        What a script calls on some processes only would wait without a word in its first collective, which the others'
        next one might take for its own.

        Args:
            call: What is called, as a user would write it.

        Raises:
            EngineError: Others have come to another call, or some do not come in PyTorch's own time for a collective.
        """
        if self.job.launched:
            self.start()
            wait_for_all(self.job, call)

    def call_on_all(self, act: Callable[[], _T]) -> _T:
        """Call a function on every process, and raise on all of them what any of them raises. Collective.

        Args:
            act: What to do; it is not collective, or fails alike everywhere.

        Raises:
            CheckpointError: The message of the first process that failed.
        """
        failure: Exception | None = None
        try:
            result = act()
        except Exception as error:  # of any kind: all processes raise it
            failure = error
        if not self._is_any(failure is not None):
            return result
        texts = self.all_gather_objects(None if failure is None else _described(failure))
        if failure is None:
            failed = next(rank for rank, text in enumerate(texts) if text is not None)
            raise CheckpointError(f"rank {failed}: {texts[failed]}")
        if isinstance(failure, _OURS):
            raise failure
        raise CheckpointError(_described(failure)) from failure

    def _is_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any process, in a fraction of the time that objects take. Collective."""
        if not self.job.launched:
            return flag
        self.start()
        found = torch.tensor(flag, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def prepare_call_checks(self) -> None:
        """Get ready for `check_same_call()`. Collective: every process."""
        if self.job.launched:
            with gloo_silenced():
                _meetings()

    def check_same_call(self, what: str, apart: str | None = None, instead: str | None = None) -> None:
        """Raise on every process unless all of them read the same now. Collective: every process.

        For what is not a reading, `apart` says what is wrong where they differ, and `instead` what to do.

        Raises:
            EngineError: They do different things, or some do not come within five minutes.
        """
        if not self.job.launched:
            return
        did = what if apart else f"read {what}"
        words = bytearray(what.encode()[:_MEET_BYTES].ljust(_MEET_BYTES))
        found = torch.empty(self.job.num_processes, _MEET_BYTES, dtype=torch.uint8)
        try:
            dist.all_gather_into_tensor(found.view(-1), torch.frombuffer(words, dtype=torch.uint8), group=_meetings())
        except RuntimeError as error:
            raise EngineError(
                f"this process {did}, and others did not within {_MEET_SECS} s: {instead or _READ_ALIKE}"
            ) from error
        read = [bytes(each.tolist()).decode(errors="replace").rstrip() for each in found]
        if len(set(read)) > 1:
            listed = "; ".join(f"rank {rank} {each}" for rank, each in enumerate(read))
            apart = apart or "the processes read different tensors at the same time"
            raise EngineError(f"{apart}: {listed}. {instead or _READ_ALIKE}")

    def rendezvous(self, tag: str, payload: bytes = b"") -> list[bytes]:
        """Wait for every process at the same tag. Collective: every process.

        Returns:
            Every process's payload, by rank.

        Raises:
            EngineError: The processes met at different tags.
        """
        met = self.all_gather_objects((tag, payload))
        tags = sorted({other for other, _ in met})
        if len(tags) > 1:
            raise EngineError(
                f"rendezvous({tag!r}): the processes met at different tags, {', '.join(map(repr, tags))}. "
                "Every process must call the same rendezvous in the same order"
            )
        return [other for _, other in met]


_READ_ALIKE = (
    "a value of a sharded parameter is put together by all processes. Read it on every rank, or call "
    "torchacc.full_state_dict(model) on every rank before"
)


@functools.cache
def _own_subgroup(
    world: dist.ProcessGroup | None, rank: int, groups: tuple[tuple[int, ...], ...], copy: int
) -> dist.ProcessGroup | None:
    """Make the groups of processes of the default group, once, and return the one with this rank."""
    own = None
    for ranks in groups:
        with gloo_silenced():
            made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            own = made
    return own


@functools.cache
def _device_mesh(
    world: dist.ProcessGroup | None, device_type: str, sizes: tuple[tuple[str, int], ...], ranks: tuple[int, ...]
) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    grid = torch.tensor(ranks, dtype=torch.int).view([size for _, size in sizes])
    with gloo_silenced():
        return DeviceMesh(device_type, grid, mesh_dim_names=tuple(name for name, _ in sizes))


@functools.cache
def _meetings() -> dist.ProcessGroup:
    """Return a group of all processes for meetings, whose members do not wait long. Collective: every process."""
    made: dist.ProcessGroup = dist.new_group(timeout=timedelta(seconds=_MEET_SECS))
    return made


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, (*_OURS, OSError)) else f"{type(error).__name__}: {error}"


def _stop() -> None:
    _own_subgroup.cache_clear()
    _device_mesh.cache_clear()
    if dist.is_initialized():
        tell_end()
        dist.destroy_process_group()
