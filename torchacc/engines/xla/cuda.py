"""NVIDIA GPUs under stock torch_xla, by the PJRT plugin that is published for JAX.

torch_xla has no CUDA of its own since 2.9. It still loads plugins, and XLA's for CUDA comes in a wheel of its own. The
two speak a C interface whose versions have to fit, so that only pairs that have been seen to compute are taken.
"""

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from torchacc.config.sections import MemoryConfig
from torchacc.env import installed_version
from torchacc.errors import ConfigError, EngineError

PLATFORM = "CUDA"
"""The value of PJRT_DEVICE, and the name by which torch_xla knows the plugin."""

MEMORY_FRACTION = 0.75
"""Of a GPU's memory: what the plugin's client takes where the config does not say."""


@dataclass(frozen=True)
class Plugin:
    """A wheel with XLA's plugin for CUDA."""

    wheel: str
    version: str
    library: str
    """Where the plugin lies beside the wheel's metadata. Importing the package around it would need JAX."""


KNOWN_PAIRS = {"2.9": Plugin("jax-cuda12-pjrt", "0.7.1", "jax_plugins/xla_cuda12/xla_cuda_plugin.so")}
"""By torch_xla's major and minor version: the plugin that runs its programs.

Later ones start, and end the first program with "Unexpected PJRT_ExecuteOptions size": torch_xla 2.9 hands over 80
bytes. 0.7.1 is the last that asks for no more; 0.7.2, the first for CUDA 13, asks for 88, and those from 0.8 for 112.
"""
_WHEELS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has an NVIDIA GPU with a driver. No driver is called for that."""
    return any(re.fullmatch(r"nvidia\d+", path.name) for path in devices.glob("nvidia*"))


def installed_plugin() -> tuple[str, str] | None:
    """Return the wheel with a plugin that is installed, and its version; None where there is none."""
    return next(((wheel, version) for wheel in _WHEELS if (version := installed_version(wheel))), None)


def check_plugin() -> Path:
    """Return where the plugin's library is, once it is known to fit the installed torch_xla. Nothing is loaded.

    Raises:
        ConfigError: There is no plugin, or not the one that runs this torch_xla's programs.
    """
    xla = Version(importlib.metadata.version("torch_xla"))
    fitting = KNOWN_PAIRS.get(f"{xla.major}.{xla.minor}")
    found = installed_plugin()
    if fitting is not None and found == (fitting.wheel, fitting.version):
        library = Path(str(importlib.metadata.distribution(fitting.wheel).locate_file(fitting.library)))
        if library.exists():
            return library
        raise ConfigError(f"{' '.join(found)} is installed, but {library} is missing: install it again")
    instead = "torch_xla 2.9 is the one that works"
    if fitting is not None:
        pair = f"{fitting.wheel}=={fitting.version}"
        instead = f"`pip install 'torchacc[xla-cuda]'`, or `pip install --no-deps {pair}`"
    raise ConfigError(
        f"XLA on an NVIDIA GPU needs a plugin that fits torch_xla {xla.public}, and "
        f"{' '.join(found or ('no plugin',))} is installed: {instead}. "
        'Otherwise use config.backend = "native", which needs none'
    )


def client_options(memory: MemoryConfig, *, drives_all: bool) -> dict[str, Any]:
    """Return what the plugin's client is made with.

    Args:
        memory: What the config says of a device's memory.
        drives_all: Whether this process has all GPUs of its machine, and not the first one.
    """
    options: dict[str, Any] = {"preallocate": memory.gpu_preallocate}
    if memory.gpu_fraction is not None:
        options["memory_fraction"] = memory.gpu_fraction
    if not drives_all:
        options["visible_devices"] = [0]
    return options


def register(options: dict[str, Any]) -> None:
    """Register the plugin's client with torch_xla.

    Raises:
        ConfigError: There is no plugin that fits.
        EngineError: A client already runs, with other options.
    """
    library = check_plugin()
    from torch_xla import _XLAC
    from torch_xla.experimental import plugins

    if _XLAC._xla_runtime_is_initialized():
        given = plugins.default().client_create_options()
        if given != options:
            raise EngineError(
                f"XLA's client for NVIDIA GPUs already runs with {given}, and {options} is asked for now: it is made "
                "once in a process, with what the first accelerate() says"
            )
        return

    class CudaPlugin(plugins.DevicePlugin):  # type: ignore[misc]
        def library_path(self) -> str:
            return str(library)

        def client_create_options(self) -> dict[str, Any]:
            return options

    plugins.register_plugin(PLATFORM, CudaPlugin())
    plugins.use_dynamic_plugins()
