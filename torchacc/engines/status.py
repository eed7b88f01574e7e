"""What may be done with a sharded model now: whether its weights are there, and whether its gradients are complete."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import nn

from torchacc.errors import EngineError

if TYPE_CHECKING:
    from torchacc.engines.native.step_in_backward import StepInBackward

_NO_WEIGHTS = (
    "it was built on the meta device and has no weights yet; torchacc.checkpoint.load(folder, model=model) loads them "
    "from a torchacc or a Hugging Face checkpoint. To start from an initialisation, build it with "
    "torchacc.deferred_init() instead"
)
_WEIGHTS, _OPTIMIZER_STATE = "the weights", "the optimizer's state"


class ModelStatus:
    """The part of a `ShardedModel` that changes while it trains. Each change is a method; a `check_…` raises."""

    def __init__(self, *, has_weights: bool) -> None:
        """Record whether the model can run at all.

        Args:
            has_weights: Whether its weights are there, and not to be loaded yet.
        """
        self._unusable = None if has_weights else _NO_WEIGHTS
        self._partly_stepped: list[str] = []
        """What of the model and its optimizer is of two steps, until it is loaded."""
        self._incomplete: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Optimizers that a load has failed for."""
        self._is_accumulating = False
        self._window_is_open = False
        self._has_failed = False
        self._lost: set[torch.Tensor] = set()
        """Parameters of whose gradients a part was lost, until they are dropped."""
        self._has_scaler = False
        self._steps_in_backward: StepInBackward | None = None

    # ---- Weights and optimizer state

    @property
    def has_weights(self) -> bool:
        """Whether the weights are there."""
        return self._unusable is None

    def check_usable(self) -> None:
        """Check that the weights are there.

        Raises:
            EngineError: They were not loaded yet, a load or a step inside of backward has failed halfway, or
                `optimizer.step()` has still to come after such a step.
        """
        self.check_complete()
        if self._unusable is not None:
            raise EngineError(f"the model cannot run, step or be saved: {self._unusable}")
        if self._partly_stepped:
            raise EngineError(
                "the model cannot run, step or be saved: a backward has raised when some of its weights had stepped "
                "already, and others had not (memory.step_in_backward): load "
                f"{' and '.join(self._partly_stepped)} of a checkpoint"
            )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer's state is complete.

        Raises:
            EngineError: A load of it has failed halfway.
        """
        if optimizer in self._incomplete:
            raise EngineError(
                f"this {type(optimizer).__name__} cannot step or be saved: loading a checkpoint has failed, and left "
                "it with state of both; load another one with optimizer=, or make a new optimizer"
            )

    @contextmanager
    def loading(self, source: object, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """Context manager in which weights, and an optimizer's state, are replaced; where it raises, neither is usable.

        Args:
            source: Where they come from, for the message.
            optimizer: The optimizer whose state is loaded, too.
        """
        self.check_complete()
        self._unusable = f"loading {source} has failed, and left it with weights of both; load another checkpoint"
        if optimizer is not None:
            self._incomplete.add(optimizer)
        yield
        self.mark_weights_loaded()
        if optimizer is not None:
            self.mark_optimizer_loaded(optimizer)

    def mark_partly_stepped(self) -> None:
        """Record that a backward has raised that steps weights, when it had stepped some of them."""
        self._partly_stepped = [_WEIGHTS, _OPTIMIZER_STATE]

    def mark_weights_loaded(self) -> None:
        """Record that all weights have been loaded."""
        self._unusable = None
        self._partly_stepped = [each for each in self._partly_stepped if each != _WEIGHTS]

    def mark_optimizer_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that all of an optimizer's state has been loaded."""
        self._incomplete.discard(optimizer)
        self._partly_stepped = [each for each in self._partly_stepped if each != _OPTIMIZER_STATE]

    # ---- Losses and gradients

    @property
    def has_scaler(self) -> bool:
        """Whether a `GradScaler` scales the model's losses."""
        return self._has_scaler

    def note_scaler(self) -> None:
        """Record that a `GradScaler` scales the model's losses."""
        self._has_scaler = True

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context manager whose backwards leave the window open."""
        self.refuse_gradients("torchacc.accumulate()")
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def on_backward(self) -> None:
        """Record that a backward runs: inside of `accumulating()` it opens the window, outside it completes it."""
        if self._steps_in_backward is not None:
            self._steps_in_backward.on_backward()
        self._window_is_open = self._is_accumulating
        self._has_failed &= self._is_accumulating

    @property
    def has_incomplete_gradients(self) -> bool:
        """Whether the gradients are those of a window that is open, or of a backward that has raised."""
        return self._window_is_open or self._has_failed or bool(self._lost)

    def on_failed_backward(self) -> None:
        """Record that a backward has raised, and has left in the gradients what is not reduced over the devices."""
        self._has_failed = True

    def on_lost_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record that a backward has raised, with which a part of these parameters' gradients is lost."""
        if self._steps_in_backward is None:  # else none outlives its backward
            self._lost.update(parameters)
        self._window_is_open = False

    def on_set_gradient(self, parameter: torch.Tensor) -> None:
        """Record that the script has given a parameter another gradient, or None."""
        self._lost.discard(parameter)

    def drop_gradients(self, optimizer: torch.optim.Optimizer | None, trained: Sequence[nn.Parameter]) -> bool:
        """Record that gradients are dropped.

        Args:
            optimizer: Whose they are; None for all of the model's.
            trained: The parameters of the model that have gradients.

        Returns:
            Whether all of them are dropped.

        Raises:
            EngineError: They are a part of those of an accumulation window, which can only be dropped together.
        """
        if optimizer is not None:
            held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            self._lost -= held
            if not held.issuperset(trained):
                self._check_no_part_of_a_window(optimizer)
                return False
        self._window_is_open = self._has_failed = False
        self._lost.clear()
        return True

    def _check_no_part_of_a_window(self, optimizer: torch.optim.Optimizer) -> None:
        if self._window_is_open:
            raise EngineError(
                f"zero_grad() of a {type(optimizer).__name__} with some of the model's parameters, after a backward "
                "inside of torchacc.accumulate(), would drop the gradients of all: call model.zero_grad() to drop "
                "them, or complete the window first"
            )

    def step_in_backward(self, steps: "StepInBackward") -> None:
        """Record what steps the weights inside of backward."""
        self._steps_in_backward = steps

    def check_complete(self) -> None:
        """Check that `optimizer.step()` has come since the last backward, where that has made the step.

        Raises:
            EngineError: It has not.
        """
        if self._steps_in_backward is not None:
            self._steps_in_backward.check_complete()

    def refuse_gradients(self, call: str) -> None:
        """Refuse a call that needs the gradients of a whole step, where backward steps and frees them one by one.

        Raises:
            EngineError: It does.
        """
        if self._steps_in_backward is not None:
            self._steps_in_backward.refuse_gradients(call)

    def check_clipping(self, call: str) -> None:
        """Check that there are complete gradients to clip.

        Raises:
            EngineError: They are incomplete, or gone.
        """
        self.refuse_gradients(call)
        self.check_window(call)

    def check_window(self, call: str) -> None:
        """Check that the gradients are complete.

        Args:
            call: What needs them, for the message.

        Raises:
            EngineError: They are those of an accumulation window that is still open, or of a backward that has raised.
        """
        if self._lost:
            raise EngineError(
                f"{call} after a backward that has raised, with which a part of the gradients is lost: call "
                "model.zero_grad(), and backward() for each micro-batch again"
            )
        if self._has_failed:
            raise EngineError(
                f"{call} after a backward that has raised: it has added to some gradients, and they are not reduced "
                "over the devices. Call model.zero_grad(), and backward() again"
            )
        if self._window_is_open:
            raise EngineError(
                f"{call} after a backward inside of torchacc.accumulate(): the gradients are not reduced over the "
                "devices yet. Leave the last micro-batch of each window outside of the context"
            )
