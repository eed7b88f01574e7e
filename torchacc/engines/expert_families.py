"""The models whose experts are spread over devices: those of which tests show that they match the unsharded run."""

from torch import nn

from torchacc.engines.patches import transformers_attention
from torchacc.errors import ConfigError
from torchacc.parallel.experts import count_experts

_FAMILIES = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
"""By transformers' `model_type`."""


def check_experts(asked: str, model: nn.Module) -> None:
    """Refuse experts of families that no test shows to be right, that are changed, or tied to others.

    Args:
        asked: The option that spreads them, with its value.
        model: The model; it is only read.

    Raises:
        ConfigError: It has such experts.
    """
    if type(model) is nn.Module:  # the trainer asks before it has a model
        return
    for name, module in model.named_modules():
        if count_experts(module) is not None:
            _check_module(asked, model, name, module)


def _check_module(asked: str, model: nn.Module, name: str, module: nn.Module) -> None:
    models = transformers_attention.models_of(model)
    family = next((each.config.model_type for each in models if module in set(each.modules())), None)
    if family not in _FAMILIES:
        raise ConfigError(
            f"{asked}: the families of transformers whose experts are spread are {', '.join(_FAMILIES)}, and "
            f"{name!r} is of {family or type(model).__name__!r}: use config.dist.fsdp.size"
        )
    around = model.get_submodule(name.rpartition(".")[0])  # which may read the weights by itself, as kernels do
    for each in (module, around):
        if not type(each).__module__.startswith(transformers_attention.LIBRARY) or "forward" in vars(each):
            raise ConfigError(
                f"{asked}: {name!r}, or the module around it, has a forward that is not transformers' own, which "
                "may look for all experts: use config.dist.fsdp.size"
            )
    tied = [each for each in module.parameters() if sum(each is other for other in _all_parameters(model)) > 1]
    if tied:
        raise ConfigError(
            f"{asked}: parameters of {name!r} are tied to others of the model, which need all of their experts: "
            "use config.dist.fsdp.size"
        )


def _all_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
