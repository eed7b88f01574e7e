"""The processes of the job on the host: started once, used for everything that is not a gradient on a device."""

import atexit
import ctypes
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from torchacc import env
from torchacc.env import Job
from torchacc.errors import CheckpointError, ConfigError, DataError, EngineError
from torchacc.launch import progress
from torchacc.logging import OF_THIS_RANK, get_logger

_T = TypeVar("_T")
_log = get_logger(__name__)

_LOOK_SECS = 5.0
"""How long a process waits in a call before it looks whether another is in another call."""
_WARN_SECS = 30.0
"""How long it waits before it says who is not there."""
_CALL_SECS = dist.default_pg_timeout.total_seconds()
"""How long it waits at all: as long as PyTorch would in the call's first collective."""
_PAUSE_SECS = 0.1
"""The longest time between two looks whether all are there."""
_MOST_ABSENT = 8
"""How many of the processes that are not there are named."""
_MEET_SECS = 300
"""How long a process that reads a sharded parameter waits for the others to do the same."""
_MEET_BYTES = 256
_OURS = (CheckpointError, ConfigError, DataError, EngineError)

_DRAIN_SECS = 2.0
"""How long the end of a process waits for threads that stay busy."""
_LOOKS = 3
"""How often in a row all threads must be seen asleep: one may have slept because another was at work."""
_TASKS = Path("/proc/self/task")


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
            _drain_at_exit()
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
        _drain_at_exit()

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
        found = torch.tensor(numbers, dtype=torch.int64)
        if self.job.launched and numbers:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return [int(number) for number in found]

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
            _expected_calls.append(_ExpectedCall(self.job, call, _expected_calls.pop() if _expected_calls else None))
            _expected_calls[-1].wait()

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

    def prepare_meetings(self) -> None:
        """Get ready for `meet()`. Collective: every process."""
        if self.job.launched:
            with gloo_silenced():
                _meetings()

    def meet(self, what: str, apart: str | None = None, instead: str | None = None) -> None:
        """Raise on every process unless all of them read the same now. Collective: every process.

        For what is no reading, `apart` says what is wrong where they differ, and `instead` what to do.

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


class _ExpectedCall:
    """A call that every process is to make, in the store through which the processes have found one another."""

    def __init__(self, job: Job, call: str, before: "_ExpectedCall | None") -> None:
        self._job, self._call = job, call
        self._number: int = 0 if before is None else before._number + 1
        self._store = _get_default_store()
        self._count = f"torchacc/call/{self._number}/{call}"
        self._everyone = f"{self._count}/all"
        self._of_before = [] if before is None else [before._count, before._everyone]
        self._began = time.monotonic()

    def wait(self) -> None:
        """Return as soon as all are there."""
        self._store.set(self._key(self._number, self._job.rank), self._call)
        if self._store.add(self._count, 1) == self._job.num_processes:
            self._store.set(self._everyone, "")
            for key in self._of_before:  # which nobody looks at any more, as all are here
                self._store.delete_key(key)
        self._store.delete_key(self._key(self._number - 2, self._job.rank))
        for secs in itertools.chain((_LOOK_SECS, _WARN_SECS), itertools.count(10 * _WARN_SECS, 10 * _WARN_SECS)):
            if self._waited_until(min(secs, _CALL_SECS)):
                return
            self._look(secs)

    def _waited_until(self, secs: float) -> bool:
        """Return whether all have come, or else as soon as so much time has gone by.

        By asking again and again: a wait of the store's own that ends so has C++ report it on the terminal.
        """
        pause = 0.0005
        while not self._store.check([self._everyone]):
            if time.monotonic() - self._began >= secs:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECS)
        return True

    def _look(self, secs: float) -> None:
        """Say who is not there, or is elsewhere."""
        absent: list[int] = []
        for rank in range(self._job.num_processes):
            key = self._key(self._number, rank)
            if not self._store.check([key]):
                if self._store.check([_ended(rank)]):
                    raise EngineError(
                        f"rank {self._job.rank} is in {self._call}, and rank {rank} has ended and not come to it: "
                        f"{_EVERY_PROCESS}"
                    )
                absent.append(rank)
            elif (other := self._store.get(key).decode()) != self._call:
                raise EngineError(
                    f"rank {self._job.rank} is in {self._call}, and rank {rank} in {other}: {_EVERY_PROCESS}"
                )
            if len(absent) > _MOST_ABSENT:
                break
        if not absent or secs < _WARN_SECS:
            return
        listed = ", ".join(map(str, absent[:_MOST_ABSENT])) + (", …" if len(absent) > _MOST_ABSENT else "")
        others = f"rank {listed} has" if len(absent) == 1 else f"ranks {listed} have"
        if secs >= _CALL_SECS:
            raise EngineError(
                f"rank {self._job.rank} has waited {_CALL_SECS:.0f} s in {self._call}, and {others} not come to it: "
                f"{_EVERY_PROCESS}"
            )
        if set(range(self._job.rank)) <= set(absent):  # of those that wait the first one speaks
            _log.warning(
                "rank %d has waited %.0f s in %s, and %s not come to it%s: %s. It waits for %.0f minutes at most",
                self._job.rank,
                secs,
                self._call,
                others,
                self._where(absent),
                _EVERY_PROCESS,
                _CALL_SECS / 60,
                extra=OF_THIS_RANK,
            )

    def _where(self, ranks: Sequence[int]) -> str:
        """Say where the first of these ranks is that a launcher of this machine has started; empty for none."""
        known = ((rank, progress.read_neighbour(self._job, rank)) for rank in ranks)
        return next((f" (rank {rank} is {at.where(time.monotonic())})" for rank, at in known if at is not None), "")

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"torchacc/call/{number}/of/{rank}"


_expected_calls: list[_ExpectedCall] = []
"""The last one."""
_EVERY_PROCESS = "every process has to make this call, in the same order as others, and not under `if rank == 0:`"

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


@contextmanager
def gloo_silenced() -> Iterator[None]:
    """Keep gloo from reporting its connections on standard output, from each rank, each time a group is made.

    Gloo has no option for that. Only C++'s `std::cout` is silenced meanwhile, not what Python prints in other threads.
    """
    say = _cout_state()
    say(_BAD)
    try:
        yield
    finally:
        say(_GOOD)


_GOOD, _BAD = 0, 1
"""States of a C++ stream."""


@functools.cache
def _cout_state() -> Callable[[int], object]:
    """Return what sets the state of C++'s `std::cout`; what does nothing where libstdc++ is not the library of C++."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        clear = library["_ZNSt9basic_iosIcSt11char_traitsIcEE5clearESt12_Ios_Iostate"]  # std::ios::clear(iostate)
        cout = ctypes.addressof(ctypes.c_char.in_dll(library, "_ZSt4cout"))
    except (OSError, AttributeError, ValueError):
        return lambda state: None
    clear.restype, clear.argtypes = None, [ctypes.c_void_p, ctypes.c_int]
    # The virtual base of a stream lies where the third entry before its table of virtual functions says.
    table = ctypes.c_void_p.from_address(cout).value or 0
    offset = ctypes.c_ssize_t.from_address(table - 3 * ctypes.sizeof(ctypes.c_void_p)).value
    return functools.partial(clear, cout + offset)


def _stop() -> None:
    _own_subgroup.cache_clear()
    _device_mesh.cache_clear()
    if dist.is_initialized():
        _tell_end()
        dist.destroy_process_group()


def _tell_end() -> None:
    with suppress(RuntimeError):  # the process that keeps the store has ended before
        _get_default_store().set(_ended(dist.get_rank()), "")


def _ended(rank: int) -> str:
    return f"torchacc/ended/{rank}"


@functools.cache
def _drain_at_exit() -> None:
    atexit.register(_drain)


def _drain() -> None:
    """Wait until gloo's threads have released their last tensors, while they can still take the interpreter's lock.

    A collective is over for its caller before gloo's thread has dropped the tensors, for which it may need the
    interpreter's lock. Python ends a thread that waits for the lock while the interpreter ends, and as this one waits
    in a destructor, that aborts the process: `terminate called without an active exception`
    (https://github.com/pytorch/pytorch/pull/179291). Destroying the group joins its threads only where nothing, such as
    FSDP2 in a model, holds the group any more.
    """
    deadline = time.monotonic() + _DRAIN_SECS
    looks = 0
    while looks < _LOOKS and time.monotonic() < deadline:
        time.sleep(0.005)  # the lock is free meanwhile
        looks = looks + 1 if _others_sleep() else 0


def _others_sleep() -> bool:
    """Return whether every thread but this one waits for something; True where the system does not tell."""
    own = str(threading.get_native_id())
    return all(_sleeps(task) for task in _TASKS.glob("*") if task.name != own)


def _sleeps(task: Path) -> bool:
    try:
        return "State:\tS" in (task / "status").read_text()
    except OSError:  # it has ended
        return True
