"""Start torch_xla's runtime once per process, with the devices that the config asks for, and run what it recorded."""

import functools
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from torchacc import env
from torchacc.config.sections import MemoryConfig
from torchacc.engines.xla import cuda, tpu
from torchacc.engines.xla.hardware import (
    check_process_count,
    is_running,
    other_devices,
    warn_of_idle_devices,
)
from torchacc.engines.xla.hardware import platform as platform
from torchacc.engines.xla.hardware import runs_on_cpu as runs_on_cpu
from torchacc.engines.xla.hardware import runs_on_gpu as runs_on_gpu
from torchacc.env import Job, installed_version
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import get_logger
from torchacc.parallel.device_order import Place

_log = get_logger(__name__)

# XLA:CPU's default scheduler runs as much at once as it can. With several virtual devices that costs time (a step of
# benchmarks/step_time.py with four takes 1.02 times eager's without it, 1.11 with), and it keeps more in memory. With
# one device per process it is the faster one (0.93 against 1.09 of raw FSDP2 with two processes).
_PLAIN_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"

# XLA:CPU's fast maximum and minimum lose a NaN, which PyTorch's keep: so would a clamp of a diverged loss.
_KEEP_NAN = "--xla_cpu_enable_fast_min_max=false"

# XLA:CPU lets XNNPACK multiply by an input of a program, and keeps what XNNPACK has packed of it by its address. Other
# weights that come to lie there later, as gathered ones do in each step, are not read: the matmul is that of the old.
_READ_WEIGHTS = "--xla_cpu_use_xnnpack=false"

# Autograd makes its device queues at the first backward of the process, for the devices that it then knows.
_AUTOGRAD_STARTED_TOO_EARLY = (
    "this process ran a backward pass on the CPU before the XLA runtime started, and PyTorch's autograd cannot add a "
    "device afterwards: call torchacc.accelerate() before the first backward(), or run that pass in another process"
)


def check_versions() -> None:
    """Check that the installed torch and torch_xla can load together, without importing torch_xla.

    Raises:
        ConfigError: torch_xla is missing, or was built for another torch.
    """
    installed = installed_version("torch_xla")
    if installed is None:
        raise ConfigError(
            'config.backend = "xla" needs torch_xla, which is not installed: `pip install torch==2.9.0 '
            'torch_xla==2.9.0`, or use config.backend = "native"'
        )
    xla = Version(installed)
    core = Version(importlib.metadata.version("torch"))
    if (core.major, core.minor) != (xla.major, xla.minor):
        raise ConfigError(
            f"torch {core} and torch_xla {xla} cannot load together, as torch_xla {xla.major}.{xla.minor} is built for "
            f"torch {xla.major}.{xla.minor}: `pip install torch=={xla.public} torch_xla=={xla.public}`, or use "
            'config.backend = "native", which needs no torch_xla'
        )


def use_plain_scheduler(*, recomputes: bool) -> None:
    """Choose the plain scheduler on the CPU, before the runtime starts, unless the user has chosen.

    Args:
        recomputes: Whether a model computes activations again, which saves nothing with the other scheduler.
    """
    if not runs_on_cpu():
        return
    if not is_running() and env.add_flag("XLA_FLAGS", _PLAIN_SCHEDULER):
        _log.debug("XLA_FLAGS=%s", _PLAIN_SCHEDULER)
    elif recomputes and not env.has_flag("XLA_FLAGS", _PLAIN_SCHEDULER):
        reason = "it was chosen in XLA_FLAGS"
        if is_running():
            reason = "the runtime started with it, before this model"
        _log.warning(
            "recompute will save no memory, and only cost time: XLA:CPU's concurrency-optimized scheduler undoes it, "
            "and %s. Start with XLA_FLAGS=%s",
            reason,
            _PLAIN_SCHEDULER,
        )


def is_installed() -> bool:
    """Return whether torch_xla is installed, in whatever version."""
    return importlib.util.find_spec("torch_xla") is not None


def use_gpu_plugin(memory: MemoryConfig, *, drives_all: bool) -> None:
    """Make NVIDIA GPUs known to the runtime, where those are its devices. Called before it is asked for any device.

    Args:
        memory: What the config says of a device's memory.
        drives_all: Whether this process has all GPUs of its machine, and not the first one.
    """
    if not runs_on_gpu():
        return
    env.set_default("PJRT_DEVICE", cuda.PLATFORM)
    _hush()
    cuda.register(cuda.client_options(memory, drives_all=drives_all))


def count_devices(num_processes: int = 1) -> int:
    """Return the number of devices of so many processes together; starts the runtime.

    Raises:
        EngineError: It cannot start, or connects other processes.
    """
    env.set_default("PJRT_DEVICE", platform())
    tpu.choose_flags(platform())
    import torch_xla.runtime as xr

    with _explained():
        found = int(xr.global_runtime_device_count())
    check_process_count(num_processes)
    return found


def local_devices() -> list[int]:
    """Return the devices of this process, by their number among those of all processes."""
    from torch_xla import _XLAC

    return [int(name.rpartition(":")[2]) for name in _XLAC._xla_get_runtime_devices()]


def device_places() -> list[Place] | None:
    """Return where the device of each number is: its slice, its position there, its core; None where that is unknown.

    TPUs alone say that.
    """
    import torch_xla.runtime as xr

    found = {int(each["name"].rpartition(":")[2]): each for each in xr.global_runtime_device_attributes()}
    ordered = [found[number] for number in sorted(found)]
    if not all("coords" in each for each in ordered):
        return None
    return [(each.get("slice_index", 0), *each["coords"], each.get("core_on_chip", 0)) for each in ordered]


def prepare_import() -> None:
    """Prepare for another library's import of torch_xla: silence it, and leave the device to `start()`."""
    _hush()
    if platform() != tpu.PLATFORM:  # which torch_xla itself has to choose
        env.set_default("PJRT_SELECT_DEFAULT_DEVICE", "0")


def start(
    *, num_devices: int, spmd: bool, seed: int | None = None, job: Job | None = None, num_processes: int = 1
) -> None:
    """Start the runtime, or check that the running one is what is needed.

    Args:
        num_devices: Devices that this process drives, or under SPMD all processes. On the CPU they are virtual.
        spmd: Whether one program runs over all of them.
        seed: Of XLA's random numbers; None for PyTorch's.
        job: The processes, with a device each, that PJRT is to connect, as it can elsewhere than on the CPU.
        num_processes: How many processes PJRT connects by itself, where it is not told to.

    Raises:
        EngineError: The runtime cannot start, already runs with other devices or, on the CPU, with XNNPACK, or autograd
            started before it.
    """
    check_versions()
    env.set_default("PJRT_DEVICE", platform())
    tpu.choose_flags(platform())
    if runs_on_cpu():
        warn_of_idle_devices()
        _ask_for_cpu_devices(num_devices)
        _read_weights()
        _keep_nan()
    _hush()
    import torch_xla
    import torch_xla.runtime as xr

    if spmd and not xr.is_spmd():
        with warnings.catch_warnings(), _explained():
            warnings.simplefilter("ignore")
            xr.use_spmd()
    elif xr.is_spmd() and not spmd:
        raise EngineError(
            "this process already runs in SPMD mode, which cannot be left: set config.dist.fsdp.use_spmd = True, or "
            "start a new process"
        )
    if job is not None and not runs_on_cpu():
        _connect(job)
    with _explained():
        found = xr.global_runtime_device_count() if spmd else xr.addressable_runtime_device_count()
    if job is None:
        check_process_count(num_processes)
    if found != num_devices:
        raise EngineError(other_devices(num_devices, found))
    if not runs_on_cpu():
        _keep_matmul_precision()
    _start_autograd(torch_xla.device())
    _seed((torch.initial_seed() if seed is None else seed) % 2**63)


def _hush() -> None:
    # XLA's C++ announces at every compile that GSPMD is deprecated; a user can do nothing about it. It reads the
    # variable at its first line, and torch_xla sets it to 1 where it is imported first.
    if not env.set_default("TF_CPP_MIN_LOG_LEVEL", "2") and "torch_xla" in sys.modules:
        env.replace_default("TF_CPP_MIN_LOG_LEVEL", default="1", value="2")


@contextmanager
def _explained() -> Iterator[None]:
    """Say on which devices the runtime could not start, and what to look at."""
    try:
        yield
    except RuntimeError as error:
        hint = ""
        if runs_on_gpu():
            hint = (
                " See whether nvidia-smi lists a GPU for each process of this machine, and what CUDA_VISIBLE_DEVICES "
                "says; PJRT_DEVICE=CPU runs XLA on the CPU."
            )
        if platform() == tpu.PLATFORM:
            hint = f" This machine has {tpu.num_chips()} TPU chips; PJRT_DEVICE=CPU runs XLA on the CPU."
        raise EngineError(f"XLA cannot start on {platform()}: {str(error).splitlines()[0]}{hint}") from error


def _connect(job: Job) -> None:
    """Configure PJRT to connect the devices of all processes, as torch_xla does in those that it starts itself.

    Raises:
        EngineError: It does not connect those that the launcher started: each would train alone.
    """
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt

    with _explained():
        pjrt.initialize_multiprocess(job.local_rank, job.local_num_processes)
    if xr.world_size() != job.num_processes:
        raise EngineError(
            f"the launcher started {job.num_processes} processes, and the XLA runtime connects {xr.world_size()} "
            "devices with one process each: start one process per device, or a single one with "
            "config.dist.fsdp.use_spmd = True"
        )


def _keep_matmul_precision() -> None:
    """Multiply float32 matrices as PyTorch would: by default XLA rounds them first, to TF32 or to bfloat16."""
    import torch_xla.backends as backends

    precision = torch.get_float32_matmul_precision()
    if precision == "highest" and platform() == tpu.PLATFORM:
        _log.info(
            "float32 matrices are multiplied as exactly as on a CPU, which takes a TPU six passes: "
            "config.compute.bf16 = True takes one, and before accelerate() torch.set_float32_matmul_precision('high') "
            "three"
        )
    backends.set_mat_mul_precision("default" if precision == "medium" else precision)


def ordinal() -> int:
    """Return this process's device among those of all processes, as PJRT numbers them."""
    import torch_xla.runtime as xr

    return int(xr.global_ordinal())


@functools.cache  # once: the next model's share would be a share of this one
def pin_to_share_of_cores(job: Job) -> None:
    """Give this process its share of the machine's cores, before the runtime makes its threads.

    Otherwise the thread pools of the machine's processes fight for all of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // job.local_num_processes)
    first = job.local_rank * share % len(cores)
    mine = cores[first : first + share]
    os.sched_setaffinity(0, mine)
    torch.set_num_threads(len(mine))
    _log.info(
        "each of the %d processes of this machine uses %d of its %d cores", job.local_num_processes, share, len(cores)
    )


def sync(*, wait: bool = False) -> None:
    """Compile and run what has been recorded so far.

    Args:
        wait: Whether to wait until it has run.
    """
    import torch_xla

    if _drawn.again and _drawn.seed is not None:
        _set_seed(_drawn.seed)
    torch_xla.sync(wait=wait)
    _drawn.seed, _drawn.again = None, False


def to_device(tensors: Sequence[torch.Tensor], shardings: Sequence[Any] | None = None) -> list[torch.Tensor]:
    """Move host tensors to the device in one transfer.

    Args:
        tensors: Host tensors.
        shardings: An XlaShardingSpec for each, under SPMD.
    """
    from torch_xla import _XLAC

    moved: list[torch.Tensor] = _XLAC._xla_tensors_from_aten(list(tensors), ["xla:0"] * len(tensors), shardings)
    return moved


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy device tensors to the host in one transfer."""
    from torch_xla import _XLAC

    copied: list[torch.Tensor] = _XLAC._xla_get_cpu_tensors(list(tensors)) if tensors else []
    return copied


def are_data(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors lie on the device, so that no program has to compute them."""
    from torch_xla import _XLAC

    return not any(_XLAC._check_tensor_need_materialization(list(tensors)))


def compile_stats() -> tuple[int, float]:
    """Return how many programs this process has compiled, and in how many seconds."""
    import torch_xla.debug.metrics as metrics

    timing = metrics.metric_data("CompileTime")
    return (timing[0], timing[1] / 1e9) if timing else (0, 0.0)


def count(event: str) -> int:
    """Return how often something has happened in this process, by torch_xla's name for it."""
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value(event) or 0


def peak_bytes() -> int | None:
    """Return the most memory of this process's device that was in use; None where PJRT does not tell, as under SPMD."""
    import torch_xla.core.xla_model as xm

    try:
        found = xm.get_memory_info("xla:0")
    except RuntimeError:
        return None
    return int(found.get("peak_bytes_used") or 0) or None


def device_kind() -> str:
    """Return the kind of this process's device as PJRT names it, or the platform where it does not, as under SPMD."""
    import torch_xla.core.xla_model as xm

    try:
        return str(xm.xla_device_kind("xla:0"))
    except RuntimeError:
        return platform()


def open_compile_cache(folder: Path) -> None:
    """Read programs from a folder, and write there what is compiled.

    Raises:
        EngineError: Something has been computed already, with no cache or another.
    """
    import torch_xla.runtime as xr
    from torch_xla import _XLAC

    if not _XLAC._xla_computation_cache_is_initialized():
        folder.mkdir(parents=True, exist_ok=True)
        xr.initialize_cache(str(folder))
    elif env.get("XLA_PERSISTENT_CACHE_PATH") != str(folder):
        raise EngineError(
            f"compute.compile_cache asks for {folder}, and XLA has computed without it, or with another, which is "
            "fixed for a process's life: call accelerate() before anything else uses XLA, and with one folder"
        )


def random_seed() -> int:
    """Return the seed of XLA's next random numbers."""
    import torch_xla.core.xla_model as xm

    return int(xm.get_rng_state())


def set_random_seed(seed: int) -> None:
    """Set the seed of XLA's next random numbers."""
    _drawn.seed, _drawn.again = None, False
    _set_seed(seed)


@dataclass
class _Drawn:
    """The random numbers of the program that is being recorded."""

    seed: int | None = None
    """The seed before the first of them."""
    again: bool = False
    """Whether some were drawn again."""


_drawn = _Drawn()


def note_random_seed() -> None:
    """Remember the seed that the random numbers of the recorded program start from, before the first of them."""
    if _drawn.seed is None:
        _drawn.seed = random_seed()


@contextmanager
def random_numbers_from(seed: int) -> Iterator[None]:
    """Context manager in which the random numbers that followed a seed are drawn again.

    Afterwards the others go on where they were. torch_xla derives the next program's seed from the one that was set
    last; `sync()` sees to it that it is the one of `note_random_seed()` again.
    """
    note_random_seed()
    at = random_seed()
    _set_seed(seed)
    try:
        yield
    finally:
        _set_seed(at)
        _drawn.again = True


def _set_seed(seed: int) -> None:
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(seed)


@functools.cache  # once: a second model must not draw the first one's random numbers again
def _seed(seed: int) -> None:
    """Seed XLA's own generator, so that torch.manual_seed() decides over dropout too."""
    import torch_xla

    torch_xla.manual_seed(seed)


def _read_weights() -> None:
    """Refuse a runtime that multiplies by weights of another step."""
    if not is_running():
        env.add_flag("XLA_FLAGS", _READ_WEIGHTS)
    if not env.has_flag("XLA_FLAGS", _READ_WEIGHTS):
        reason = "XLA's runtime started before accelerate()" if is_running() else "XLA_FLAGS asks for it"
        raise EngineError(
            f"XLA's CPU client would multiply by XNNPACK, as {reason}: it finds packed matrices by their address, and "
            f"computes with the old where a new one comes to lie there, silently. Start with XLA_FLAGS={_READ_WEIGHTS}"
        )


def _keep_nan() -> None:
    if not is_running():
        env.add_flag("XLA_FLAGS", _KEEP_NAN)
    elif not env.has_flag("XLA_FLAGS", _KEEP_NAN):
        _log.warning(
            "max(), clamp(), relu() and the like will lose a NaN, as that of a loss that has diverged: XLA's runtime "
            "started before accelerate(). Start with XLA_FLAGS=%s",
            _KEEP_NAN,
        )


def _ask_for_cpu_devices(num_devices: int) -> None:
    if env.set_default("CPU_NUM_DEVICES", str(num_devices)):
        return
    given = env.get("CPU_NUM_DEVICES")
    if given != str(num_devices) and not is_running():
        raise EngineError(
            f"CPU_NUM_DEVICES={given} is set, and the config asks for {num_devices} XLA devices in this process: leave "
            "the variable to torchacc, or make the two agree. It is fixed for a process's life"
        )


def _start_autograd(device: torch.device) -> None:
    probe = torch.ones(1, device=device, requires_grad=True)
    try:
        (probe * 2).sum().backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise EngineError(_AUTOGRAD_STARTED_TOO_EARLY) from error
