"""Which devices XLA has here, and what is refused because of them before a model is built."""

import functools
import sys

from torchacc import env
from torchacc.engines.xla import cuda, tpu
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import get_logger

_log = get_logger(__name__)


def platform() -> str:
    """Return what XLA's devices are, as PJRT_DEVICE names it: what that asks for, else the best that is here."""
    given = env.get("PJRT_DEVICE")
    if given:
        return given
    if tpu.has_library() and tpu.num_chips():
        return tpu.PLATFORM
    return cuda.PLATFORM if cuda.has_gpu() and cuda.installed_plugin() is not None else "CPU"


def runs_on_cpu() -> bool:
    """Return whether XLA's devices are this machine's CPU."""
    return platform() == "CPU"


def runs_on_gpu() -> bool:
    """Return whether XLA's devices are NVIDIA GPUs."""
    return platform() == cuda.PLATFORM


def check_platform() -> None:
    """Check that what drives XLA's devices is installed, before anything is started.

    Raises:
        ConfigError: It is not, or does not fit.
    """
    if runs_on_gpu():
        cuda.check_plugin()
    tpu.check_library()


def check_drives_all(job: Job) -> None:
    """Refuse a process that is to have all devices, and that torch_xla has started beside others, or in threads.

    Raises:
        ConfigError: It has: each would train alone.
    """
    if job.launched or env.get("PJRT_LOCAL_PROCESS_RANK") is None:
        return
    count = int(env.get("PJRT_LOCAL_PROCESS_COUNT") or 1)
    if is_running():  # then torch_xla has made a thread for each device of this process
        import torch_xla.runtime as xr

        count *= xr.addressable_runtime_device_count()
    if count > 1:
        raise ConfigError(
            f"torch_xla.launch() or xmp.spawn() has started {count} processes or threads, and tells them neither RANK "
            f"nor WORLD_SIZE, so that each would train a model of its own: {_INSTEAD_OF_SPAWN}"
        )


def check_one_each(job: Job) -> None:
    """Refuse one process for each device where the processes are not those that the devices need.

    Raises:
        ConfigError: They are not.
    """
    if platform() == tpu.PLATFORM:
        tpu.check_processes(job)
    given = env.get("PJRT_LOCAL_PROCESS_COUNT")
    if given is not None and given != str(job.local_num_processes):
        raise ConfigError(
            f"PJRT_LOCAL_PROCESS_COUNT={given}, as torch_xla.launch() and xmp.spawn() set it, and the launcher has "
            f"started {job.local_num_processes} processes on this machine: {_INSTEAD_OF_SPAWN}"
        )


_INSTEAD_OF_SPAWN = (
    "call the function itself, and start the script by `torchrun` or `torchacc launch`, with a process for each "
    "device, or by `python` with config.dist.fsdp.use_spmd = True"
)


def refuse_one_process_per_gpu() -> None:
    """Refuse a process for each device where the devices are NVIDIA GPUs.

    Raises:
        ConfigError: They are.
    """
    if runs_on_gpu():
        raise ConfigError(
            "config.backend = 'xla' with one process for each NVIDIA GPU: torch_xla 2.9 ends a process at the first "
            "tensor that is on a GPU of its own ('XLA:CUDA is not supported anymore'). Use config.backend = 'native', "
            "which has one process for each GPU; or start a single one, `python your_script.py`, with "
            "config.dist.fsdp.use_spmd = True, which drives all GPUs of the machine"
        )


def is_asked_for_gpu() -> bool:
    """Return whether the environment asks XLA to run on NVIDIA GPUs; torch_xla never sets that by itself."""
    return env.get("PJRT_DEVICE") == cuda.PLATFORM


def is_running() -> bool:
    """Return whether the runtime has started, and its devices are fixed."""
    if "torch_xla" not in sys.modules:
        return False
    from torch_xla import _XLAC

    return bool(_XLAC._xla_runtime_is_initialized())


def check_process_count(num_processes: int) -> None:
    """Refuse a runtime that connects other processes than the launcher has started.

    Raises:
        EngineError: It does: each would take itself for the only one, or wait for others.
    """
    import torch_xla.runtime as xr

    count = xr.process_count()
    if count > num_processes == 1:
        raise EngineError(
            f"the XLA runtime connects {count} processes, as on a TPU slice of several hosts, and nobody has told this "
            "one its rank: each would take itself for the only one. Start one process on every host, `torchacc launch` "
            "or `torchrun` with its --nnodes, --node_rank and --nproc_per_node=1, and config.dist.fsdp.use_spmd = "
            "True; or one process per device, with use_spmd = False"
        )
    if count != num_processes:
        raise EngineError(
            f"the launcher has started {num_processes} processes, and the XLA runtime connects {count}: start one on "
            "each host of the TPU slice, and on no other. Slices are connected where their machines set "
            "MEGASCALE_COORDINATOR_ADDRESS, MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID, as GKE does"
        )


def check_one_each_host(job: Job) -> None:
    """Refuse one program for the devices of several processes where these are not one on each host of a TPU slice.

    Raises:
        ConfigError: They are not.
    """
    on_tpus = platform() == tpu.PLATFORM
    if on_tpus and job.local_num_processes == 1:
        return
    instead = "start one on each TPU host, --nproc_per_node=1" if on_tpus else "start the script with `python`"
    raise ConfigError(
        f"use_spmd=True drives all devices from one process, and this job has {job.num_processes}, "
        f"{job.local_num_processes} of them on this machine: {instead}, or set config.dist.fsdp.use_spmd = False"
    )


def other_devices(asked: int, found: int) -> str:
    """Say why the runtime may have other devices than are asked for, and what to do."""
    if platform() == tpu.PLATFORM and asked == 1 and found > 1:
        return (
            f"the config asks for one XLA device in this process, and this machine has {found} TPU devices. Drive all "
            f"of them from this process, config.dist.fsdp.use_spmd = True; or start one process for each, `torchrun "
            f"--nproc_per_node={found} your_script.py`; or let it see one: {tpu.ONE_CHIP} python your_script.py"
        )
    return (
        f"the config asks for {asked} XLA devices in this process, and the runtime has {found}. The number is fixed "
        "when the runtime starts, by the first accelerate() of a process or whatever else uses XLA before it: let the "
        f"sizes in config.dist multiply to {found}, or start another process for this model"
    )


@functools.cache
def warn_of_idle_devices() -> None:
    """Warn where XLA leaves a GPU or TPUs idle: torch_xla sets PJRT_DEVICE=CPU too, if it is imported first."""
    by_choice = "as PJRT_DEVICE=CPU is set, by you or by importing torch_xla first"
    if chips := tpu.num_chips():
        install = "" if tpu.has_library() else ", once libtpu is installed: `pip install 'torch_xla[tpu]==2.9.0'`"
        _log.warning(
            "XLA runs on the CPU of this machine, which has %d TPU chips, %s: set PJRT_DEVICE=TPU to use them%s",
            chips,
            by_choice,
            install,
        )
    if not cuda.has_gpu():
        return
    if cuda.installed_plugin() is None:
        _log.warning(
            "XLA runs on the CPU of this machine, which has an NVIDIA GPU: `pip install 'torchacc[xla-cuda]'` lets XLA "
            'use it, config.backend = "native" needs nothing more'
        )
    else:
        _log.warning(
            "XLA runs on the CPU of this machine, which has an NVIDIA GPU, %s: set PJRT_DEVICE=CUDA to use it",
            by_choice,
        )
