"""NVIDIA GPUs under stock torch_xla, by the PJRT plugin that is published for JAX.

torch_xla has no CUDA of its own since 2.9. It still loads plugins, and XLA's for CUDA comes in a wheel of its own. The
two speak a C interface whose versions have to fit, so that only pairs that have been seen to fit are taken.
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


@dataclass(frozen=True)
class Plugin:
    """A wheel with XLA's plugin for CUDA."""

    wheel: str
    version: str
    library: str
    """Where the plugin lies beside the wheel's metadata. Importing the package around it would need JAX."""


_CUDA_12 = Plugin("jax-cuda12-pjrt", "0.8.0", "jax_plugins/xla_cuda12/xla_cuda_plugin.so")
_CUDA_13 = Plugin("jax-cuda13-pjrt", "0.11.2", "jax_plugins/xla_cuda13/xla_cuda_plugin.so")

KNOWN_PAIRS: dict[str, tuple[Plugin, ...]] = {"2.9": (_CUDA_12, _CUDA_13)}
"""By torch_xla's major and minor version: the plugins that it loads, the one to recommend first."""


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine has an NVIDIA GPU with a driver. No driver is called for that."""
    return any(re.fullmatch(r"nvidia\d+", path.name) for path in devices.glob("nvidia*"))


def installed_plugin() -> Plugin | None:
    """Return the plugin that is installed, in whatever version; None where there is none."""
    for plugin in (_CUDA_12, _CUDA_13):
        if version := installed_version(plugin.wheel):
            return Plugin(plugin.wheel, version, plugin.library)
    return None


def check_plugin() -> Path:
    """Return where the plugin's library is, once it is known to fit the installed torch_xla. Nothing is loaded.

    Raises:
        ConfigError: There is no plugin, or it has not been seen to work with this torch_xla.
    """
    xla = Version(importlib.metadata.version("torch_xla"))
    fitting = KNOWN_PAIRS.get(f"{xla.major}.{xla.minor}", ())
    plugin = installed_plugin()
    if plugin is not None and plugin in fitting:
        library = Path(str(importlib.metadata.distribution(plugin.wheel).locate_file(plugin.library)))
        if library.exists():
            return library
        raise ConfigError(f"{plugin.wheel} {plugin.version} is installed, but {library} is missing: install it again")
    found = f"{plugin.wheel} {plugin.version} is installed" if plugin else "no plugin is installed"
    pairs = " or ".join(f"`pip install --no-deps {each.wheel}=={each.version}`" for each in fitting)
    raise ConfigError(
        f"XLA on an NVIDIA GPU needs a plugin that fits torch_xla {xla.public}, and {found}: "
        + (f"`pip install 'torchacc[xla-cuda]'`, or {pairs}. " if pairs else "torch_xla 2.9 is the one that works. ")
        + 'Otherwise use config.backend = "native", which needs none'
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
    """Let torch_xla's client be the plugin's.

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
