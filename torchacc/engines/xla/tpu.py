"""Find TPUs before the runtime starts: from the PCI bus, the packages and the environment."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from torchacc import env
from torchacc.env import Job
from torchacc.errors import ConfigError

PLATFORM = "TPU"
"""The value of PJRT_DEVICE."""

_VARIABLE = "LIBTPU_INIT_ARGS"
FLAGS: Mapping[str, str] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
"""Options of the compiler of TPUs. By itself it makes a loop of each large matmul whose result is summed up over the
devices, to send beside the parts of the matmul; it copies what goes into the loop, and puts the loops of all layers'
weight gradients behind the whole backward, so that each layer's activations and gradients wait for them."""
_OF_TORCH_XLA = {
    "xla_tpu_use_enhanced_launch_barrier": "false",
    "xla_latency_hiding_scheduler_rerun": "1",
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_tpu_enable_flash_attention": "false",
}
"""What torch_xla 2.9 adds where it finds chips."""
_OF_TORCH_XLA_FOR_V5 = {"xla_enable_async_all_gather": "true", "xla_enable_async_collective_permute": "true"}

_VENDOR = "0x1ae0"
PCI_DEVICES = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
"""Google's numbers of TPUs on the PCI bus, as torch_xla 2.9 has them."""

ONE_CHIP = "TPU_VISIBLE_CHIPS=0 TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 TPU_PROCESS_BOUNDS=1,1,1"
"""Variables that let a process without a launcher see the first chip alone, as `torch_xla` itself sets them."""
_CHOOSES_CHIPS = ("TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS")


def choose_flags(platform: str) -> None:
    """Choose options of a TPU's compiler before it is loaded, unless the user has chosen."""
    if platform == PLATFORM:
        for name, value in FLAGS.items():
            env.add_flag(_VARIABLE, f"--{name}={value}")


def flags_of_run(chip: str) -> str:
    """Return LIBTPU_INIT_ARGS as a run has it: with the user's flags, those of `choose_flags()`, and torch_xla's.

    Args:
        chip: What it runs on, such as `TPU v5e`.
    """
    more = _OF_TORCH_XLA_FOR_V5 if chip.startswith("TPU v5") else {}
    return env.flags_with(_VARIABLE, {**FLAGS, **_OF_TORCH_XLA, **more})


def num_chips(bus: Path = Path("/sys/bus/pci/devices")) -> int:
    """Return the number of TPU chips of this machine."""
    return sum(
        _number(device / "vendor") == _VENDOR and _number(device / "device") in PCI_DEVICES for device in bus.glob("*")
    )


def has_library() -> bool:
    """Return whether torch_xla would find libtpu, which drives the chips. It is neither loaded nor imported."""
    return bool(env.get("TPU_LIBRARY_PATH")) or importlib.util.find_spec("libtpu") is not None


def check_library() -> None:
    """Refuse a machine with TPUs and no libtpu: torch_xla would silently train on its CPU.

    Raises:
        ConfigError: It is one, and PJRT_DEVICE does not choose.
    """
    if env.get("PJRT_DEVICE") is None and not has_library() and (chips := num_chips()):
        raise ConfigError(
            f"this machine has {chips} TPU chips, and libtpu, by which XLA drives them, is not installed: "
            "`pip install 'torch_xla[tpu]==2.9.0'`. To train on the machine's CPU, set PJRT_DEVICE=CPU"
        )


def check_processes(job: Job) -> None:
    """Refuse another number of processes than there are chips: the runtime would wait for the others for ever.

    Raises:
        ConfigError: There is another number, and the environment does not say which chips are to be used.
    """
    chips = num_chips()
    if chips in (0, job.local_num_processes) or any(env.get(name) for name in _CHOOSES_CHIPS):
        return
    raise ConfigError(
        f"the launcher starts {job.local_num_processes} processes on this machine, which has {chips} TPU chips, and "
        f"each process drives one, with all of them connected: start {chips} of them, `--nproc_per_node={chips}`, or "
        "a single one with config.dist.fsdp.use_spmd = True"
    )


def _number(file: Path) -> str:
    try:
        text = file.read_text().strip().lower()
    except OSError:
        return ""
    return text if re.fullmatch("0x[0-9a-f]+", text) else ""
