"""What is looked at of a model's gradients before it is sharded, in every engine."""

from torch import nn

from torchacc.errors import ConfigError
from torchacc.logging import get_logger

_log = get_logger(__name__)


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuse lookups with sparse gradients, which no engine can exchange: XLA has none, FSDP2 takes dense ones.

    Raises:
        ConfigError: The model has one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ConfigError(
                f"{name or 'the model'} is an nn.{type(module).__name__} with sparse=True, and sparse gradients cannot "
                "be summed over devices: build it with sparse=False, whose numbers are the same with SGD and Adagrad, "
                "and step it with an optimizer for dense gradients, such as AdamW"
            )


def warn_of_gradients(model: nn.Module) -> None:
    """Warn of gradients from before the model is sharded, which its shards do not have.

    A step may have used them already, as where a model comes with its optimizer's state.
    """
    held = next((name for name, parameter in model.named_parameters() if parameter.grad is not None), None)
    if held is not None:
        _log.warning(
            "the parameter %r already has a gradient, which is dropped: a model is sharded without its gradients. Call "
            "model.zero_grad(set_to_none=True) before accelerate(), or the backward() again after it",
            held,
        )
