"""Linear layers that compute in float8, by torchao.

A layer stays the module that it is, with its hooks and its parameters: only its class becomes another, of torchao's.
"""

import importlib
from dataclasses import replace

import torch
from torch import nn

from torchacc.config import Config
from torchacc.errors import ConfigError
from torchacc.parallel.float8_layers import Float8Layers

_OLDEST_GPU = (8, 9)
"""The compute capability from which on there are matmuls in float8."""


def check(config: Config, device: torch.device) -> None:
    """Refuse float8 where it cannot be had, before anything is started; for a config with `compute.fp8`.

    Raises:
        ConfigError: It cannot: torchao is not installed, the device has no such matmuls, or the config asks for what
            is not known to be right with it.
    """
    if config.dist.tp.size > 1:
        raise ConfigError(
            f"compute.fp8 = True with dist.tp.size = {config.dist.tp.size} is not available: the layers compute with "
            "distributed tensors there, which torchacc does not round to float8. Put these devices on "
            "config.dist.fsdp.size, or leave fp8 at False"
        )
    _check_torchao()
    why = None if config.compute.fp8_emulate else _why_it_cannot(device)
    if why is not None:
        raise ConfigError(
            f"compute.fp8 = True cannot be had on this machine: {why}. Leave fp8 at False; config.compute.fp8_emulate "
            "= True rounds to float8 and multiplies in float32, slowly, to see what it does to a model's numbers"
        )


def _check_torchao() -> None:
    try:
        importlib.import_module("torchacc.engines.patches.float8_gather")
    except ImportError as error:
        missing = error.name == "torchao" and isinstance(error, ModuleNotFoundError)
        why = "is not installed" if missing else f"has not what torchacc knows of it ({error})"
        raise ConfigError(
            f"compute.fp8 = True needs torchao, which {why}: `pip install 'torchacc[fp8]'` brings one that fits, or "
            "leave fp8 at False"
        ) from error


def _why_it_cannot(device: torch.device) -> str | None:
    """Return why a device has no products in float8; None where it has."""
    if device.type == "cpu":
        return "its device is a CPU, which has no products in float8"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"its device is {device.type}, and torchacc knows float8 on NVIDIA GPUs only"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _OLDEST_GPU:
        return f"its GPU has the compute capability {major}.{minor}, and products in float8 need 8.9"
    return None


def convert(model: nn.Module, layers: Float8Layers) -> None:
    """Turn linear layers into torchao's float8 layers, in place.

    Args:
        model: The model, before anything else is done to its modules' forwards.
        layers: Which, and how.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from torchacc.engines.native.float8_layer import Float8Layer

    config = replace(Float8LinearConfig.from_recipe_name(layers.recipe), emulate=layers.are_emulated)
    for name in layers.names:
        layer = model.get_submodule(name)
        made = convert_to_float8_training(layer, config=config)
        layer.__class__ = Float8Layer
        for key, value in vars(made).items():
            vars(layer).setdefault(key, value)
