"""The kernel that computes a model's attention: what a device has, and how a model comes to use it.

Models of transformers choose by its attention interface. Others call `scaled_dot_product_attention()`, and run in a
context that leaves PyTorch one backend.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torchacc.config import Config
from torchacc.config.option_types import Attention
from torchacc.config.sections import ComputeConfig
from torchacc.engines.patches import torch_compile, transformers_attention
from torchacc.engines.patches.transformers_attention import EAGER, FLEX, SDPA
from torchacc.env import installed_version
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import get_logger

_log = get_logger(__name__)

OWN = "auto"
"""The value that leaves a model its own, which on TPUs is computed in blocks where it is PyTorch's function."""
OF_EVERY_ENGINE = frozenset({OWN, EAGER, SDPA})
"""What all engines have."""
BLOCKWISE = "blockwise"
"""In the place of `scaled_dot_product_attention()`, under XLA."""
FLASH = "flash"
"""The same, by the kernel of TPUs where the devices are TPUs, and it takes what it is given."""
IN_BLOCKS = frozenset({BLOCKWISE, FLASH})
"""What keeps no scores under XLA."""
OF_XLA = OF_EVERY_ENGINE | IN_BLOCKS
_MATH = "sdpa_math"
_BACKENDS: Mapping[str, SDPBackend] = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    _MATH: SDPBackend.MATH,
}


def asked_of_xla(compute: ComputeConfig) -> str:
    """Return which of `OF_XLA` a config asks for, by its name or by TorchAcc's older option."""
    return FLASH if compute.acc_scaled_dot_attn else compute.attention


@dataclass(frozen=True)
class _Package:
    """A package with kernels of FlashAttention."""

    name: str
    oldest_gpu: tuple[int, int]
    """The compute capability from which on they run."""
    install: str
    """How it is installed."""


_PACKAGES: Mapping[str, _Package] = {
    "flash_attention_2": _Package("flash-attn", (8, 0), "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": _Package("flash-attn-3", (8, 0), "build the folder hopper/ of FlashAttention's repository"),
    "flash_attention_4": _Package("flash-attn-4", (9, 0), "pip install flash-attn-4"),
}
_OLDEST_GPUS = {"sdpa_flash": (8, 0), "sdpa_efficient": (5, 0), "sdpa_cudnn": (8, 0)}
_IN_HALF_PRECISION = frozenset({"sdpa_flash", "sdpa_cudnn", *_PACKAGES})
"""What takes bfloat16 and float16 alone on a GPU."""
_WITHOUT_DROPOUT = frozenset({FLEX, "flash_attention_3", "flash_attention_4"})
_CALLS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_NO_KERNEL = ("No available kernel", "No viable backend")
"""How PyTorch's errors begin where the backend that is left does not take what it is given."""


@dataclass(frozen=True)
class KernelFinding:
    """Whether one kernel can run on a device."""

    name: str
    """A value of `compute.attention`."""
    reason: str | None
    """Why it cannot; None where it can."""


def survey(device: torch.device) -> list[KernelFinding]:
    """Return which kernels of attention a device has natively."""
    return [
        KernelFinding(name, _why_it_cannot(name, device))
        for name in get_args(Attention)
        if name != OWN and name not in IN_BLOCKS
    ]


def check_device(config: Config, device: torch.device) -> None:
    """Refuse a kernel that a device does not have, or not as the config asks for it.

    Raises:
        ConfigError: It does not.
    """
    name, compute = config.compute.attention, config.compute
    why = _why_it_cannot(name, device)
    if why is not None:
        raise ConfigError(
            f"compute.attention = {name!r} cannot be had on this machine: {why}. `torchacc env` lists what can; "
            "'sdpa' can everywhere"
        )
    if name in _IN_HALF_PRECISION and device.type != "cpu" and not (compute.bf16 or compute.fp16):
        raise ConfigError(
            f"compute.attention = {name!r} computes in bfloat16 or float16: set config.compute.bf16 = True, or take "
            "'sdpa' or 'flex_attention', which compute in float32, too"
        )
    if name == FLEX and config.memory.gc_policy != "full":
        raise ConfigError(
            f"compute.attention = 'flex_attention' with memory.gc_policy = {config.memory.gc_policy!r} is not "
            "available: PyTorch cannot trace it while single results are kept. Leave config.memory.gc_policy at "
            "'full', or set config.compute.attention = 'sdpa'"
        )
    if name == FLEX and device.type == "cpu" and compute.compile and compute.compile_backend == "inductor":
        raise ConfigError(
            "compute.attention = 'flex_attention' with compute.compile = True cannot be had on a CPU, for which the "
            "compiler has no backward of it: set config.compute.compile = False, or config.compute.attention = 'sdpa'"
        )


def check_model(config: Config, model: nn.Module) -> None:
    """Refuse a kernel that cannot compute a model's attention, or not as the model has it.

    Raises:
        ConfigError: It cannot.
    """
    name = config.compute.attention
    if name == OWN or type(model) is nn.Module:  # the trainer asks before it has a model
        return
    models = transformers_attention.models_of(model)
    if not models and name not in (SDPA, *_BACKENDS):
        raise ConfigError(
            f"compute.attention = {name!r}: {type(model).__name__} is not a model of transformers, whose attention "
            "could be exchanged; it computes what it is written to. Leave attention at 'auto', or choose a backend for "
            f"its calls of scaled_dot_product_attention(): {', '.join(map(repr, _BACKENDS))}"
        )
    for each in models:
        why = transformers_attention.why_it_cannot(each, _in_transformers(name))
        if why is not None:
            raise ConfigError(
                f"compute.attention = {name!r} cannot compute the attention of {type(each).__name__}: {why}. Leave "
                "config.compute.attention at 'auto', which is what the model has"
            )
        dropout = transformers_attention.dropout_of(each) if name in _WITHOUT_DROPOUT else None
        if dropout is not None:
            raise ConfigError(
                f"compute.attention = {name!r} has no dropout, and {type(each).__name__} has {dropout} in its "
                "config: set it to 0, or take 'sdpa' or 'eager'"
            )


def install(config: Config, model: nn.Module, recomputed: Iterable[str]) -> None:
    """Set the attention kernel of a model to the one that a config asks for.

    Args:
        config: A resolved config that `check_device()` and `check_model()` have passed.
        model: The model, before its modules' forwards are made to run twice.
        recomputed: Names of the modules whose forwards run again in backward.
    """
    name = config.compute.attention
    if name == OWN:
        return
    models = transformers_attention.models_of(model)
    for each in models:
        transformers_attention.choose(each, _in_transformers(name))
        if _in_transformers(name) != SDPA:
            transformers_attention.refuse_masks(each, name)
        if name in _PACKAGES:
            transformers_attention.refuse_packed_documents(each, name)
    if name in _BACKENDS:
        watches = not models and not config.compute.compile
        for path in dict.fromkeys(("", *recomputed)):
            module = model.get_submodule(path)
            module.forward = _by_one_backend(module.forward, name, _Calls() if watches and not path else None)
    _log.info("attention: %s", name)


def keeps_scores(name: str) -> bool:
    """Return whether what a kernel keeps for backward has all scores, which grow with the square of the length."""
    return name in (_MATH, EAGER)


def _in_transformers(name: str) -> str:
    return SDPA if name in _BACKENDS or name in IN_BLOCKS else name


def _why_it_cannot(name: str, device: torch.device) -> str | None:
    """Return why a device does not have a kernel; None where it has."""
    if name in OF_EVERY_ENGINE or name == _MATH or (name == "sdpa_flash" and device.type == "cpu"):
        return None
    if name in IN_BLOCKS:
        return "it is for XLA (config.backend = 'xla'); natively the kernels of 'sdpa' keep as little"
    if name == FLEX:
        if device.type == "cpu":
            return None
        if device.type not in ("cuda", "xpu"):
            return f"PyTorch has no flex attention for {device.type}"
        return torch_compile.why_it_cannot(device)
    if device.type != "cuda":
        return f"it is for NVIDIA GPUs, and the device is {device.type}"
    package = _PACKAGES.get(name)
    if package is not None and installed_version(package.name) is None:
        return f"{package.name} is not installed: {package.install}"
    oldest = _OLDEST_GPUS[name] if package is None else package.oldest_gpu
    found = torch.cuda.get_device_capability(device)
    if torch.version.cuda and found < oldest:
        return f"this GPU has the compute capability {'.'.join(map(str, found))}, and it needs {oldest[0]}.{oldest[1]}"
    return None


class _Calls(TorchFunctionMode):
    """While entered, notes whether there is a call that PyTorch has backends for."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch."""
        self.any = self.any or func in _CALLS
        return func(*args, **(kwargs or {}))


def _by_one_backend(forward: Callable[..., Any], name: str, calls: _Calls | None) -> Callable[..., Any]:
    """Return a forward that leaves PyTorch one backend of attention, and warns where its first run calls none."""
    to_watch = [] if calls is None else [calls]

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        watched = to_watch.pop() if to_watch else None
        try:
            with sdpa_kernel(_BACKENDS[name]), watched or nullcontext():
                output = forward(*args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(_NO_KERNEL):
                raise
            raise EngineError(
                f"compute.attention = {name!r}: that backend alone does not take what the model's attention gives it, "
                "such as its dtype, a mask (of padding, packed documents or a sliding window), dropout or the size of "
                "heads. Set config.compute.attention = 'sdpa', by which PyTorch takes the fastest that does"
            ) from error
        if watched is not None and not watched.any:
            _log.warning(
                "compute.attention = %r has no effect: this forward calls neither scaled_dot_product_attention() nor "
                "nn.MultiheadAttention, for which it chooses PyTorch's backend",
                name,
            )
        return output

    return run
