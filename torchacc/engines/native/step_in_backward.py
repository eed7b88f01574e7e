"""`memory.step_in_backward`: each weight steps as soon as backward has its gradient, which is then freed.

A script's loop stays as it is. Its `optimizer.step()` and `zero_grad()` find no gradients, and are watched: an order of
calls in which new weights at the end of backward would make another run than plain PyTorch's raises.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import increment_version

from torchacc.config import Config
from torchacc.engines.native.gradients import accumulates, take_part_in_backward
from torchacc.engines.optimizers import ELEMENTWISE
from torchacc.engines.option_conflicts import refuse_beside
from torchacc.engines.status import ModelStatus
from torchacc.errors import ConfigError, EngineError
from torchacc.parallel.axes import Role
from torchacc.parallel.mesh import Mesh

ASKED = "memory.step_in_backward = True"
_LOOP = "zero_grad(), one backward(), optimizer.step()"
_HANDED_IN = "model, loader, optimizer = torchacc.accelerate(model, loader, config, optimizer=optimizer)"


def check(config: Config, mesh: Mesh) -> None:
    """Refuse options with which a weight cannot step by itself, or with which no gradient would be freed earlier.

    Raises:
        ConfigError: The config asks for one.
    """
    others = {
        "compute.fp16 = True": config.compute.fp16,
        "dist.fsdp.cpu_offload = True": config.dist.fsdp.cpu_offload,
        "dist.pp.size": config.dist.pp.size > 1,
        "dist.ep.size": config.dist.ep.size > 1,
    }
    refuse_beside(ASKED, others)
    num_replicas = mesh.size(Role.REPLICATE)
    if mesh.size(Role.SHARD) == 1 and num_replicas > 1:
        raise ConfigError(
            f"{ASKED} with {num_replicas} replicas of a model that nobody shards: their gradients are averaged in "
            "buckets, and all are kept until backward is over. Shard it, config.dist.fsdp.size, or leave "
            "step_in_backward at False"
        )


def check_optimizer(optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse an optimizer that cannot step one weight after the other, or that is not known when backward begins.

    Raises:
        ConfigError: It is one, or there is none.
    """
    if optimizer is None:
        raise ConfigError(
            f"{ASKED} needs the optimizer before the first backward: make it of the model's parameters before, and "
            f"hand it in: {_HANDED_IN}. `torchacc train` and transformers' Trainer look at the gradients of a whole "
            "step, and cannot have it"
        )
    kind = type(optimizer)
    if kind.__name__ not in ELEMENTWISE or vars(torch.optim).get(kind.__name__) is not kind:
        raise ConfigError(
            f"{ASKED} with {kind.__name__}, which is not known to update each element by itself: use one of "
            f"torch.optim's that does, such as AdamW, or leave step_in_backward at False"
        )


class _StepState(Enum):
    """Where a script is in its loop."""

    CLEARED = auto()
    """There are no gradients: a backward may come."""
    IN_BACKWARD = auto()
    STEPPED = auto()
    """A backward has stepped: `optimizer.step()` has to come."""
    CONFIRMED = auto()
    """It has come: `zero_grad()` is next, as plain PyTorch's gradients would still be there."""


class StepInBackward:
    """Steps the weights of one model inside of its backward.

    Args:
        model: The model, sharded.
        optimizer: Of its parameters.
        status: Is asked, and told, what may be done with the model.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, status: ModelStatus) -> None:
        self._optimizer = optimizer
        self._status = status
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._state = _StepState.CLEARED
        self._groups: Mapping[torch.Tensor, dict[str, Any]] = {}
        """The optimizer's group of each parameter, in the backward that runs."""
        self._options: Sequence[Mapping[str, Any]] = ()
        """What the groups said in the last backward."""
        self._stepped: set[torch.Tensor] = set()
        """What has stepped in the last backward."""
        for parameter in self._names:
            if parameter.dim():  # a number waits for optimizer.step(), as its gradient may come in parts
                self._watch(parameter)
        for owner in (model, optimizer):
            self._watch_zero_grad(owner)
        take_part_in_backward(self)
        status.step_in_backward(self)

    def check_complete(self) -> None:
        """Check that `optimizer.step()` has come since the last backward.

        Raises:
            EngineError: It has not.
        """
        if self._state is _StepState.STEPPED:
            raise EngineError(
                f"the model or its optimizer is run, saved or loaded between backward() and optimizer.step(): with "
                f"{ASKED} the weights are new already, and without they would be the old ones. Call optimizer.step() "
                "first, or do it before backward()"
            )

    def refuse_gradients(self, call: str) -> None:
        """Refuse a call that needs the gradients of a whole step.

        Raises:
            EngineError: Always.
        """
        raise EngineError(
            f"{call} with {ASKED}: each gradient is gone as soon as its weight has stepped, before those of other "
            "weights are there. Leave one of them out"
        )

    def on_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """See to it that the script's step comes where it would have done what backward has done.

        Raises:
            EngineError: It does not.
        """
        if optimizer is not self._optimizer:
            raise EngineError(
                f"a step of a {type(optimizer).__name__} that was not handed to accelerate(): with {ASKED} one "
                f"optimizer has all parameters of the model that are trained: {_HANDED_IN}"
            )
        if has_closure:
            raise EngineError(f"optimizer.step(closure) with {ASKED}: call backward() before, and step() without it")
        if self._state is _StepState.CONFIRMED:
            raise EngineError(
                f"optimizer.step() twice after one backward() with {ASKED}, whose gradients are gone: the order is "
                f"{_LOOP}"
            )
        if self._state is _StepState.STEPPED:
            self._check_options()
            self._state = _StepState.CONFIRMED

    def end_failed_backward(self, *, accumulates: bool) -> None:
        """Refuse a model of which a backward that has raised has stepped some weights and not all."""
        if self._state is _StepState.IN_BACKWARD:
            self._state = _StepState.CLEARED
            if self._stepped:
                self._status.mark_partly_stepped()

    def _watch(self, parameter: nn.Parameter) -> None:
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen one may be trained later
        # Weakly, as what autograd holds the garbage collector does not look into.
        parameter.register_post_accumulate_grad_hook(partial(_tell, ref(self)))
        parameter.requires_grad_(is_trained)
        vars(parameter)["register_post_accumulate_grad_hook"] = _refuse_hook

    def _watch_zero_grad(self, owner: Any) -> None:
        zero_grad: Callable[..., None] = owner.zero_grad

        def watched(set_to_none: bool = True) -> None:
            if not set_to_none:
                raise EngineError(f"zero_grad(set_to_none=False) with {ASKED}, whose gradients are freed: leave it out")
            if self._state is _StepState.STEPPED:
                raise EngineError(
                    f"zero_grad() between backward() and optimizer.step(): with {ASKED} backward has made the step "
                    f"already. The order is {_LOOP}; to leave a step out, leave its backward() out"
                )
            zero_grad()
            self._state = _StepState.CLEARED

        owner.zero_grad = watched

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Step a parameter with the gradient that backward has just given it, and free that."""
        gradient = parameter.grad
        if gradient is None:
            return
        self.on_backward()
        group = self._groups.get(parameter)
        if group is None:  # nobody steps it
            return
        if gradient.requires_grad:
            raise EngineError(f"backward(create_graph=True) with {ASKED}, which frees the gradients: leave one out")
        if parameter in self._stepped:
            raise EngineError(
                f"the parameter {self._names[parameter]!r} has got a gradient twice in one backward, as where its unit "
                f"runs twice in a forward, or it is used outside of its unit too: with {ASKED} it has stepped after "
                "the first. Leave step_in_backward at False"
            )
        self._stepped.add(parameter)
        self._step(parameter, group)
        with torch._C.DisableTorchFunctionSubclass():
            parameter.grad = None

    def on_backward(self) -> None:
        """Begin a backward that adds to gradients, unless it has begun."""
        if self._state is not _StepState.IN_BACKWARD and accumulates():
            self._begin()

    def _begin(self) -> None:
        """Begin a backward, where gradients of an earlier one would be gone without this option, too."""
        if self._state is not _StepState.CLEARED:
            before = "optimizer.step()" if self._state is _StepState.STEPPED else "zero_grad()"
            raise EngineError(
                f"a second backward() without {before} in between, with {ASKED}: their gradients would have been added "
                f"up. The order is {_LOOP}; several batches make one step without step_in_backward"
            )
        if self._optimizer._optimizer_step_pre_hooks:
            raise EngineError(
                f"optimizer.register_step_pre_hook() with {ASKED}: the hook would run after the step. Leave one out"
            )
        groups = self._optimizer.param_groups
        self._groups = {parameter: group for group in groups for parameter in group["params"]}
        self._options = _options_of(self._optimizer)
        self._stepped = set()
        self._state = _StepState.IN_BACKWARD
        # FSDP2 reduces the last gradients in a callback of its own, which may be queued later: this one queues another.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._finish))

    def _finish(self) -> None:
        self._state = _StepState.STEPPED if self._stepped else _StepState.CLEARED
        self._groups = {}

    @torch.no_grad()
    def _step(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        optimizer = self._optimizer
        groups, optimizer.param_groups = optimizer.param_groups, [{**group, "params": [parameter]}]
        try:
            # Without the hooks of a step, which are for the script's own.
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        finally:
            optimizer.param_groups = groups
        if group.get("fused"):
            increment_version(parameter)

    def _check_options(self) -> None:
        for number, (before, now) in enumerate(zip(self._options, _options_of(self._optimizer), strict=False)):
            changed = [key for key in before if before[key] != now.get(key)]
            if changed:
                raise EngineError(
                    f"optimizer.param_groups[{number}][{changed[0]!r}] was changed between backward() and "
                    f"optimizer.step(), from {before[changed[0]]} to {now.get(changed[0])}: with {ASKED} backward has "
                    "made the step already. Change it before backward() or after optimizer.step(), as schedulers do"
                )


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what an optimizer's groups say of a step, numbers in tensors as numbers."""
    return [
        {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in ({key: group[key] for key in group if key != "params"} for group in optimizer.param_groups)
    ]


def _tell(stepping: "ref[StepInBackward]", parameter: nn.Parameter) -> None:
    found = stepping()
    if found is not None:
        found.on_gradient(parameter)


def _refuse_hook(hook: object) -> NoReturn:
    raise EngineError(
        f"register_post_accumulate_grad_hook() of a parameter with {ASKED}, whose gradient is gone when the hook would "
        "run. Leave one of them out"
    )
