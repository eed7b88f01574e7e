"""What is known of trl's trainers: which of them run here, and which of their options cannot be right."""

from typing import Any

from torchacc.errors import ConfigError

COVERED = ("SFTTrainer", "DPOTrainer", "RewardTrainer")
"""Of trl; the others generate text, or train in ways that have not been compared with one device."""

_OF_BATCHES = ("aot", "aot_unpaired", "bco_pair", "sft")
"""Losses of trl's DPOTrainer that are not means over pairs: they sort, compare or average over a device's batch."""


def _of_trl(kind: type) -> type | None:
    """Return the most derived class of trl that a trainer is, or is made of; None where none is.

    A class that has a covered one's name, or is made of it, may train in another way (trl's `experimental`).
    """
    return next((each for each in kind.__mro__ if each.__module__.split(".")[0] == "trl"), None)


def refuse_uncovered(kind: type) -> None:
    """Refuse a trainer of trl that is not known to be right here.

    Raises:
        ConfigError: It is one, or is made of one.
    """
    of_trl = _of_trl(kind)
    if of_trl and not (of_trl.__name__ in COVERED and of_trl.__module__.startswith("trl.trainer.")):
        raise ConfigError(
            f"trainer_for({kind.__name__}): of trl's trainers {', '.join(COVERED)} of trl.trainer run on torchacc's "
            f"engines; {of_trl.__module__}.{of_trl.__name__} has not been compared with one device"
        )


def check_losses(trainer: Any, num_losses: int) -> None:
    """Refuse losses that are not means over a step's examples.

    Args:
        trainer: A trainer that is built.
        num_losses: The devices with a loss of their own.

    Raises:
        ConfigError: Each device's loss would be of its own batch, and the mean of them another one.
    """
    if num_losses == 1:
        return
    if getattr(trainer.args, "predict_with_generate", False):
        raise ConfigError(
            f"predict_with_generate=True would have each of {num_losses} devices generate as many tokens as its own "
            "rows need, and those that are done would leave the others waiting: leave it out, and evaluate the saved "
            "model on one device, or call model.generate(..., synced_gpus=True) on every rank"
        )
    unlike = [loss for loss in getattr(trainer, "loss_types", ()) if loss in _OF_BATCHES]
    if unlike:
        raise ConfigError(
            f"loss_type={unlike} compares or averages over a whole batch, of which each of {num_losses} devices has a "
            "part: choose another loss_type, such as 'sigmoid'"
        )
    if getattr(trainer, "aux_loss_enabled", False):
        raise ConfigError(
            f"the trainer adds the balance of experts (router_aux_loss_coef={trainer.router_aux_loss_coef}) of each of "
            f"{num_losses} devices' own batch, which is not that of all: set router_aux_loss_coef=0.0"
        )


def is_zero_without_labels(trainer: Any) -> bool:
    """Tell whether a batch without labels has the loss zero, as trl's SFTTrainer has it, and not the mean of none."""
    of_trl = _of_trl(type(trainer))
    of_sft = of_trl is not None and of_trl.__name__ == "SFTTrainer"
    return of_sft and trainer.compute_loss_func is None and trainer.label_smoother is None
