"""Build the model that a stage names, without memory for its full weights."""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from torchacc.engines.deferred import deferred_init
from torchacc.errors import ConfigError, in_one_line
from torchacc.memory_plan import WithoutValues
from torchacc.train.hub import local_folder

_NEEDS_VALUES = re.compile(
    r"\bmeta (tensors?|device|storage)\b|\b(on|device|type)[ =]'?meta\b|\bdevices\b.*\bmeta\b", re.IGNORECASE
)
"""How PyTorch says that an operation needs values, which the meta device has not."""
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "z_loss_coefficient")
"""The attributes by which causal language models weigh what they add to the loss of the targets."""
_TOKENS_OF_TEXT = ("bos_token_id", "eos_token_id", "pad_token_id")


def model_config(options: Mapping[str, Any], tokenizer: Any) -> PretrainedConfig:
    """Return transformers' configuration of the model that a section `model_config_…` describes.

    The vocabulary is the tokenizer's where the section names no size.

    Args:
        options: `model_type` and the options of its configuration; or `pretrained`, a folder or a hub name.
        tokenizer: The tokenizer of the text.

    Raises:
        ConfigError: There is no such checkpoint, or the vocabulary is too small.
    """
    if "pretrained" in options:
        try:
            config = AutoConfig.from_pretrained(local_folder(options["pretrained"]), trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"pretrained = {options['pretrained']!r}: {in_one_line(error)}") from None
    else:
        of_text = {"vocab_size": len(tokenizer), **{name: getattr(tokenizer, name) for name in _TOKENS_OF_TEXT}}
        config = AutoConfig.for_model(**{**of_text, **options})
    if config.vocab_size < len(tokenizer):
        raise ConfigError(
            f"vocab_size = {config.vocab_size} of the model, and the tokenizer has {len(tokenizer)} tokens: write "
            f"vocab_size: {len(tokenizer)}, or leave it out"
        )
    return config


def planned_config(options: Mapping[str, Any]) -> PretrainedConfig | None:
    """Return the configuration of the model that a section `model_config_…` describes, as the model is going to run.

    The model is built for it, and run once, without memory for its weights; None where only the hub knows it.

    Raises:
        ConfigError: transformers cannot build it or run it, or it cannot be trained.
    """
    pretrained = options.get("pretrained")
    if pretrained is not None and not Path(pretrained).expanduser().is_dir():
        return None
    try:
        if pretrained is None:
            # Those of the text are not known yet, and the family's own may be beyond a small vocabulary.
            config = AutoConfig.for_model(**{**dict.fromkeys(_TOKENS_OF_TEXT, 0), **options})
        else:
            config = AutoConfig.from_pretrained(local_folder(pretrained), trust_remote_code=False)
        if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ConfigError(f"model_type {config.model_type} is not a family of causal language models")
        planned: Any = build_model(config, initialised=False)
    except ConfigError:
        raise
    except Exception as error:  # whatever a family's code runs into
        raise ConfigError(
            f"transformers cannot build this model: {type(error).__name__}: {in_one_line(error)}"
        ) from None
    if not hasattr(planned.config, "vocab_size"):
        raise ConfigError(
            f"model_type {config.model_type} consists of several models: use a family of text alone, such as gpt2, "
            "llama or gemma3_text"
        )
    _check_forward(planned)
    planned.config.use_cache = False  # as in `loss_of`
    return planned.config


def _check_forward(model: Any) -> None:
    """Refuse a model on the meta device whose layers do not fit one another, which shows only when it runs."""
    if getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("batched_mm")  # the one that runs without values
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # advice about this batch
    try:
        with torch.no_grad(), WithoutValues():
            loss_of(model, {"input_ids": tokens, "labels": tokens}, 1)
    except NotImplementedError:
        return  # what it does depends on values
    except Exception as error:  # whatever a family's code runs into
        if not (isinstance(error, RuntimeError | TypeError) and _NEEDS_VALUES.search(str(error))):
            raise ConfigError(
                f"transformers can build this model, and not run it: {type(error).__name__}: {in_one_line(error)}"
            ) from None
    finally:
        logging.set_verbosity(verbosity)


def build_model(config: PretrainedConfig, *, initialised: bool) -> nn.Module:
    """Build a causal language model.

    Args:
        config: Its configuration.
        initialised: Whether it starts from its own initialisation, by PyTorch's generator; else it gets its weights
            from a checkpoint once it is sharded.

    Raises:
        ConfigError: It has no way to say by how many tokens its loss is to be divided.
    """
    if initialised:
        model = deferred_init(AutoModelForCausalLM.from_config, config, trust_remote_code=False)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    parameters = inspect.signature(model.forward).parameters
    divides = "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if not divides or getattr(model, "accepts_loss_kwargs", True) is False:
        raise ConfigError(
            f"model_type {config.model_type}: {type(model).__name__} takes no num_items_in_batch, so that its loss "
            "cannot be divided by the targets of all devices: use a model that takes it, such as gpt2, llama or qwen2"
        )
    return model


def loss_of(model: nn.Module, batch: Mapping[str, Any], divisor: torch.Tensor | int) -> torch.Tensor:
    """Return the sum of the losses at a batch's targets, over a divisor, and what the model adds to it.

    Args:
        model: The model.
        batch: Its inputs, and `labels`.
        divisor: A number, or a tensor without dimensions on the model's device.
    """
    # With a cache of keys and values, packed documents would see one another.
    loss: torch.Tensor = model(**batch, num_items_in_batch=divisor, use_cache=False).loss
    return loss


@contextmanager
def scaling_added_losses(model: nn.Module, factor: float) -> Iterator[None]:
    """Context manager in which a model scales what it adds to the loss of the targets, as to balance experts.

    The model adds it to the loss of each micro-batch, and divides the targets' part alone by those of the step.

    Args:
        model: The model.
        factor: 1 over the number of micro-batches of a step, for their mean; 0 to leave it out.
    """
    coefficients = {name: getattr(model, name) for name in _COEFFICIENTS if hasattr(model, name)}
    for name, coefficient in coefficients.items():
        setattr(model, name, coefficient * factor)
    try:
        yield
    finally:
        for name, coefficient in coefficients.items():
            setattr(model, name, coefficient)
