"""FSDP2's group of the parameters of one unit: when modules show them unsharded, and what comes of their gradients."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.autograd.graph import increment_version

from torchacc.engines.native import full_shards
from torchacc.engines.patches.private_names import FSDPParam, FSDPParamGroup, TrainingState
from torchacc.errors import EngineError

if TYPE_CHECKING:
    from torchacc.engines.native.fsdp_groups import FSDPGroups

TIMES_DATA = "_torchacc_times_data"
"""The attribute that counts how often a script has got a parameter's `data`."""


class FSDPGroup(FSDPParamGroup):
    """The parameters of one unit."""

    _waits = False
    """Whether unsharded weights wait for backward, while modules show the shards."""
    _keeps = False
    """Whether a graph of gradients may need the unsharded weights, which then stay until they change."""
    is_alone = True
    """Whether there is one process only."""
    is_last = False
    """Whether no more gradients of this backward are to come."""
    number: int
    """Which of the model's groups it is."""
    owner: "FSDPGroups"
    _in_window: set[FSDPParam]
    """The parameters of which any process may hold gradients of an accumulation window."""
    _watched: WeakSet[FSDPParam]
    """The parameters whose unsharded weights have a hook that ends a backward."""
    _versions: tuple[tuple[int, int, int], ...] = ()
    """How often each shard had been written to when it was last gathered: by itself, by its memory, or unseen."""

    def unshard(self, async_op: bool = False) -> None:
        """Gather, unless the weights that were kept for this backward are still current."""
        if self._waits:
            if self._may_reuse() and self._versions == self.versions_now():
                self._waits = False
                for parameter in self.fsdp_params:
                    parameter.to_unsharded()
                return
            self._to_sharded()
        if self.is_sharded and self._all_gather_result is None:
            self._note_versions()
            self.owner.note_gather(self.number)
        with no_inference_mode(), _without_own_functions():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Wait for the gather, and let modules show the unsharded weights."""
        with no_inference_mode(), _without_own_functions():
            if self._all_gather_result is not None and self._has_weights:
                in_backward = self._training_state is TrainingState.PRE_BACKWARD
                for parameter in self.fsdp_params:
                    full_shards.register_unsharded(parameter, in_backward=in_backward)
                self._to_unsharded()
                self._all_gather_result = None
                return
            super().wait_for_unshard()

    @cached_property
    def _has_weights(self) -> bool:
        """Whether the shards are full weights, as no other process has a part of them."""
        return full_shards.are_full_weights(self)

    def reshard(self) -> None:
        """Register the shards on the modules; keep unsharded weights only where backward may use them."""
        if self._keeps:
            self._register_sharded()
        elif self._training_state is not TrainingState.FORWARD:
            super().reshard()
        elif self._is_done_after_forward():
            self._to_sharded()
        else:
            self._register_sharded()

    def _may_reuse(self) -> bool:
        """Return whether unsharded weights that wait may be used now, if they are current."""
        return self._keeps or self._training_state is TrainingState.PRE_BACKWARD

    def _is_done_after_forward(self) -> bool:
        """Return whether unsharded weights are freed after the forward that ends."""
        return self._reshard_after_forward or not torch.is_grad_enabled()

    def post_backward(self, *unused: Any) -> None:
        """Reduce gradients, once all are there: those of a graph of gradients come in an order of their own."""
        if torch.is_grad_enabled():  # only where this backward makes a graph
            self._refuse_gradients_with_graph()
            self._keep()
        if self.is_last or not self._keeps:
            self._fill_in_gradients()
            with nullcontext() if self._have_hooks() else _without_own_functions():
                if self._has_weights and self.reduce_grads and full_shards.take_gradients(self):
                    self._hand_over_gradients()
                else:
                    super().post_backward(*unused)

    def _hand_over_gradients(self) -> None:
        """End a backward as FSDP2 does, without a reduction."""
        self._training_state = TrainingState.POST_BACKWARD
        if self.reshard_after_backward:
            self.reshard()
        full_shards.hand_over_gradients(self.fsdp_params)

    def _have_hooks(self) -> bool:
        """Return whether a script's hooks see gradients once they are reduced."""
        with _without_own_functions():
            return any(getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) for each in self.fsdp_params)

    def _fill_in_gradients(self) -> None:
        """Give zeros to weights without a gradient, such as those of experts that have got no token.

        Another process may have a gradient there: FSDP2 would add up what happens to lie at the same place.
        """
        if self.is_alone:
            return
        if self._training_state is not TrainingState.IDLE:
            self._in_window.update(filter(_is_trained, self.fsdp_params))
        if not self.reduce_grads or not self._in_window:
            return
        held = [p.unsharded_accumulated_grad for p in self.fsdp_params if p.unsharded_accumulated_grad is not None]
        for parameter in self._to_fill_in():
            weight: Any = parameter._unsharded_param
            if has_gradient(parameter) or parameter.sharded_param.grad is not None:
                self.owner.with_gradient.add(parameter)
            else:
                self.owner.note_filled_in(parameter)
            if held and parameter.unsharded_accumulated_grad is None:  # all of a window in its dtype
                parameter.unsharded_accumulated_grad = _zeros_for(weight, held[0].dtype)
            elif weight.grad is None:
                weight.grad = _zeros_for(weight, weight.dtype)

    def _to_fill_in(self) -> list[FSDPParam]:
        """Return the parameters that need a gradient in each process: all that are trained, or were in the window.

        A hook that runs after the gradient, as one that steps an optimizer, has none where no process has any.
        """
        trained = [each for each in self.fsdp_params if each in self._in_window]
        self._in_window.clear()
        if not any(getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) for each in trained):
            return trained
        used = self.owner.agree_on([int(has_gradient(each)) for each in trained])
        return [each for each, is_used in zip(trained, used, strict=True) if is_used]

    def free_unsharded(self) -> None:
        """Free unsharded weights, and those that were gathered ahead and not used."""
        self._training_state = TrainingState.IDLE
        self.finalize_backward()
        self._to_sharded()

    def _keep(self) -> None:
        if self._keeps or self.is_sharded:
            return
        self._keeps = True
        for parameter in self.fsdp_params:
            if parameter not in self._watched and parameter._unsharded_param.requires_grad:
                self._watched.add(parameter)
                parameter._unsharded_param.register_post_accumulate_grad_hook(self.owner.finish_this_backward)

    def _refuse_gradients_with_graph(self) -> None:
        for parameter in self.fsdp_params:
            gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if gradient is not None and gradient.requires_grad:
                self.owner.abandon_backward()
                raise EngineError(
                    "backward(create_graph=True) of a sharded model: parameter.grad is a shard here, which cannot be "
                    "connected to the graph. Write gradients = torch.autograd.grad(loss, tuple(model.parameters()), "
                    "create_graph=True), which gives full ones"
                )

    def _register_sharded(self) -> None:
        if self.is_unsharded:
            self._waits = True
            for parameter in self.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)

    def sum_gradients(self) -> None:
        """Add the gradients that unsharded weights were given outside of a backward to those that wait."""
        for parameter in self.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced over the devices yet."""
        self._partial_reduce_output = None
        self._in_window.clear()
        for parameter in self.fsdp_params:
            drop_gradient(parameter)

    def _to_sharded(self) -> None:
        if self._keeps and self._versions == self.versions_now():
            self._register_sharded()
            return
        self._waits = self._keeps = False
        super()._to_sharded()

    def _init_mp_dtypes(self) -> None:
        super()._init_mp_dtypes()
        if self._orig_dtype is None:  # all are frozen now, which may change
            self._orig_dtype, self._reduce_dtype = self.fsdp_params[0].orig_dtype, self.fsdp_params[0].reduce_dtype

    def versions_now(self) -> tuple[tuple[int, int, int], ...]:
        """Return how often each shard has been written to: by itself, by its memory, or unseen."""
        with _without_own_functions():
            return tuple(
                (p.sharded_param._version, p._sharded_local_tensor._version, vars(p.sharded_param).get(TIMES_DATA, 0))
                for p in self.fsdp_params
            )

    def _note_versions(self) -> None:
        """Bump the versions, for autograd, of weights that were written to since their last gather.

        What it has saved of them for a backward that is still to come is not what it was: it then raises, as it does
        for a model that is not sharded.
        """
        before, self._versions = self._versions, self.versions_now()
        for parameter, (old, *_), (new, *_) in zip(self.fsdp_params, before, self._versions, strict=False):
            if old != new:
                increment_version(_tensors_of(parameter))


@contextmanager
def no_inference_mode() -> Iterator[None]:
    """Make tensors that a later training step can use, where an evaluation in inference mode is what gathers first."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _without_own_functions() -> Any:
    """Context manager of PyTorch's own work with shards, which `shard_arithmetic.call()` would only make slower."""
    return torch._C.DisableTorchFunctionSubclass()


def _is_trained(parameter: FSDPParam) -> bool:
    weight: Any = parameter._unsharded_param
    return bool(weight.requires_grad and parameter.sharded_param.requires_grad)


def has_gradient(parameter: FSDPParam) -> bool:
    """Return whether a parameter has gradients that are not reduced over the devices yet."""
    weight: Any = parameter._unsharded_param
    return weight.grad is not None or parameter.unsharded_accumulated_grad is not None


def _zeros_for(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient of zeros, also for a distributed weight, or one in float8, which has none of its own kind."""
    if hasattr(weight, "to_local"):
        return torch.zeros_like(weight, dtype=dtype)
    return torch.zeros(weight.shape, dtype=dtype, device=weight.device)


def drop_gradient(parameter: FSDPParam) -> None:
    """Forget a parameter's gradients that are not reduced over the devices yet."""
    parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


def _tensors_of(parameter: FSDPParam) -> list[torch.Tensor]:
    unsharded: Any = parameter._unsharded_param
    return [unsharded, unsharded._local_tensor] if parameter.is_dtensor else [unsharded]
