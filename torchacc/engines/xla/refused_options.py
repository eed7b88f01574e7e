"""The options that the native engine alone can carry out, and why XLA cannot. Needs no torch_xla."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchacc.config import Config
from torchacc.engines import attention_kernels
from torchacc.errors import ConfigError


def _is_set(value: Any) -> bool:
    return bool(value)


@dataclass(frozen=True)
class RefusedOption:
    """An option that XLA cannot carry out."""

    why: str
    """The message, behind the option and its value."""
    is_asked: Callable[[Any], bool] = _is_set
    """Whether a value of it asks for what XLA cannot."""


_ATTENTION = (
    "is not available under XLA, which knows no kernels of GPUs: leave config.compute.attention at 'auto', 'sdpa', "
    "'eager', 'blockwise' or 'flash', or use config.backend = \"native\""
)
REFUSED_OPTIONS: Mapping[str, RefusedOption] = {
    "compute.attention": RefusedOption(_ATTENTION, lambda name: name not in attention_kernels.OF_XLA),
    "compute.compile": RefusedOption(
        "is not available under XLA, which compiles each step as a whole by itself: leave it at False, or use "
        'config.backend = "native"'
    ),
    "compute.fp16": RefusedOption(
        "is not available under XLA: it is about 100 times slower on a CPU, and its gradients need a scaler, which "
        "waits for the device in each step to learn whether all are finite. Use config.compute.bf16 = True, which "
        'needs no scaler, or config.backend = "native"'
    ),
    "compute.fp8": RefusedOption(
        "is not available under XLA, to which torchao's float8 layers are unknown: leave it at False, or use "
        'config.backend = "native"'
    ),
    "dist.fsdp.cpu_offload": RefusedOption(
        "is not available under XLA: the optimizer's step is part of the device's program, which updates parameters "
        "and state in place; from the host all of them would travel both ways in each step. Shard over more devices "
        '(config.dist.fsdp.size), or use config.backend = "native"'
    ),
    "dist.pp.size": RefusedOption(
        "is not available under XLA, whose processes run one program, and stages run different ones: use "
        'config.dist.fsdp.size, or config.backend = "native"',
        lambda size: size > 1,
    ),
    "dist.sp.ring_size": RefusedOption(
        "is not available under XLA, which gathers a layer's keys and values: leave it out, or use "
        'config.backend = "native"'
    ),
    "memory.gc_policy": RefusedOption(
        "is not available under XLA, where a module is recomputed from what goes into it, and no single result is "
        "kept: leave it at 'full', and choose fewer modules by config.memory.gc_every or gc_cls, or use "
        'config.backend = "native"',
        lambda policy: policy != "full",
    ),
    "memory.step_in_backward": RefusedOption(
        "is not available under XLA, where gradients are values inside of the step's program, which frees each once "
        'nothing needs it: leave it at False, or use config.backend = "native"'
    ),
    "memory.offload_activations": RefusedOption(
        "is not available under XLA: what forward saves is a value inside of the device's program, which PyTorch "
        'cannot move. Compute it again (config.memory.gc = True), or use config.backend = "native"'
    ),
}
"""By the option's path; `registry.choose()` takes the native engine for them, where it may choose."""


def refused_option(config: Config) -> str | None:
    """Return the path of the first option of a config that XLA cannot carry out."""
    return next((path for path, option in REFUSED_OPTIONS.items() if option.is_asked(attrgetter(path)(config))), None)


def refuse_options(config: Config) -> None:
    """Refuse what XLA cannot carry out.

    Raises:
        ConfigError: The config asks for it.
    """
    path = refused_option(config)
    if path is not None:
        why = REFUSED_OPTIONS[path].why
        raise ConfigError(f"{path} = {attrgetter(path)(config)!r} {why}")
