"""`fsdp()`: one call that shards a model, with the arguments of zeta's function of that name."""

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from torchacc.api import accelerate
from torchacc.config import Config
from torchacc.config.option_types import ShardingStrategy
from torchacc.engines import registry
from torchacc.env import read_job
from torchacc.errors import ConfigError
from torchacc.logging import get_logger
from torchacc.parallel.units import infer_layer_classes

_log = get_logger(__name__)

_PRECISIONS = ("bf16", "fp16", "fp32")
_STRATEGIES: Mapping[str, ShardingStrategy] = {
    "SHARD_GRAD": "SHARD_GRAD_OP",
    "SHARD_GRAD_OP": "SHARD_GRAD_OP",
    "FULL_SHARD": "FULL_SHARD",
    "NO_SHARD": "NO_SHARD",
}


def fsdp(
    model: nn.Module,
    auto_wrap: bool = False,
    mp: str = "fp32",
    shard_strat: str = "NO_SHARD",
    TransformerBlock: type[nn.Module] | None = None,  # noqa: N803 (the seed's name)
) -> nn.Module:
    """Shard a model over all processes of the job, or move it to the device of a single one. Collective.

    This is the short form of `accelerate()` for a model without a loader. Get its batches from
    `torchacc.shard_loader(loader, model)`, or let each process read its own part of the data. The model's forward moves
    inputs from the CPU to its device. Move labels that the model does not take to the device of the output yourself.

    It differs from zeta's function in four ways. It starts the process group itself. It infers the class of the layers
    if `TransformerBlock` is None, where zeta wraps nothing. It reduces gradients in float32, keeps the dtype of buffers
    and returns outputs in float32, where zeta uses `mp` for all three. A loss that the model returns is the mean over
    all processes, not this process's own.

    Args:
        model: The model; it is changed in place.
        auto_wrap: If True, each layer of the class `TransformerBlock` is gathered separately, otherwise the model is
            gathered at once.
        mp: Dtype of the computation: `bf16`, `fp16` (native engine only, with a `torchacc.GradScaler`) or `fp32`. The
            weights that the optimizer steps are in float32.
        shard_strat: `FULL_SHARD`, `SHARD_GRAD` (or PyTorch's name for it, `SHARD_GRAD_OP`) or `NO_SHARD`.
        TransformerBlock: The class of the layers, used only with `auto_wrap`; None to infer it from the model.

    Returns:
        The model.

    Raises:
        ValueError: An argument is none of its choices; the model has no layer of the class that is passed; or none is
            passed, and none can be inferred.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r}: expected a model, an instance of nn.Module")
    if mp not in _PRECISIONS:
        raise ConfigError(f"mp={mp!r}: expected one of {_listed(_PRECISIONS)}")
    if shard_strat not in tuple(_STRATEGIES):  # which compares, where a mapping would hash
        raise ConfigError(f"shard_strat={shard_strat!r}: expected one of {_listed(_STRATEGIES)}")
    if not isinstance(auto_wrap, bool):
        raise ConfigError(f"auto_wrap={auto_wrap!r}: expected True or False")
    _check_class(TransformerBlock)
    _complete(model)
    config = Config()
    options = config.dist.fsdp
    options.size = read_job().num_processes
    options.sharding_strategy = _STRATEGIES[shard_strat]
    layers = _layer_classes(model, TransformerBlock) if auto_wrap else set()
    if layers:
        options.wrap_layer_cls = layers
    else:  # as no part of the model is larger than the model, it is the only unit
        options.min_num_params = 1 + sum(parameter.numel() for parameter in model.parameters())
    if not auto_wrap and TransformerBlock is not None:
        _log.info("fsdp(): TransformerBlock has no effect without auto_wrap=True")
    config.compute.bf16, config.compute.fp16 = mp == "bf16", mp == "fp16"
    options.forward_prefetch = registry.has_effect(config, "dist.fsdp.forward_prefetch", read_job())
    return accelerate(model, config=config)  # type: ignore[no-any-return]


def _layer_classes(model: nn.Module, given: type[nn.Module] | None) -> set[str]:
    """Return the names of the classes to gather one by one; none where the layers have no parameters."""
    if given is None:
        inferred = infer_layer_classes(model)
        if not inferred:
            raise ConfigError(
                f"auto_wrap=True, and {type(model).__name__} neither names its layers (_no_split_modules) nor has a "
                "ModuleList of layers of one class: pass their class as TransformerBlock, or auto_wrap=False"
            )
        return inferred
    inside = [module for module in model.modules() if module is not model]
    layers = [module for module in inside if type(module).__name__ == given.__name__]
    if not layers:
        classes = ", ".join(sorted({type(module).__name__ for module in inside})) or "none"
        raise ConfigError(
            f"TransformerBlock={given.__name__}: no module inside of {type(model).__name__} is of this class. The "
            f"classes there: {classes}"
        )
    if not any(True for layer in layers for _ in layer.parameters()):
        _log.warning("fsdp(): no %s has parameters of its own: the model is gathered at once", given.__name__)
        return set()
    return {given.__name__}


def _check_class(given: object) -> None:
    if given is None or isinstance(given, type) and issubclass(given, nn.Module):
        return
    raise ConfigError(
        f"TransformerBlock={given!r}: expected a class, such as nn.TransformerEncoderLayer, or None to infer it"
    )


def _complete(model: nn.Module) -> None:
    """Make modules of what has not called `nn.Module.__init__()`, as a placeholder in an example may not have."""
    for module in _all_modules(model):
        if "_parameters" not in vars(module):
            _log.warning("fsdp(): %s.__init__() does not call super().__init__()", type(module).__name__)
            nn.Module.__init__(module)


def _all_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside of it, each before what it is asked for."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _all_modules(child)


def _listed(choices: Iterable[str]) -> str:
    return ", ".join(map(repr, choices))
