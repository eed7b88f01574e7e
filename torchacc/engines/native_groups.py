"""FSDP2's groups of parameters, of which modules show whole ones only while a forward or a backward runs.

FSDP2 leaves the root's weights whole after a forward, and with SHARD_GRAD_OP those of every unit, as backward needs
them: a script that looks at `model.parameters()` then finds temporary tensors, and what it does to them is lost. Here
modules show their shards again as soon as a unit's forward is over. Whole weights that wait for backward do so hidden,
and go where no backward can follow, or another forward begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._pytree import tree_leaves

from torchacc.engines.native_arithmetic import OWNER, install

_TIMES_DATA = "_torchacc_times_data"
"""The attribute that counts how often a script has got a parameter's `data`."""


class Group(FSDPParamGroup):
    """The parameters of one unit."""

    _waits = False
    """Whether whole weights wait for backward, while modules show the shards."""
    _versions: tuple[tuple[int, int, int], ...] = ()
    """How often each shard had been written to when it was last gathered: by itself, by its memory, or unseen."""

    def unshard(self, async_op: bool = False) -> None:
        """Gather, unless what has waited for this backward is what a gather would give."""
        if self._waits:
            if self._training_state is TrainingState.PRE_BACKWARD and self._versions == self._versions_now():
                self._waits = False
                for parameter in self.fsdp_params:
                    parameter.to_unsharded()
                return
            self._to_sharded()
        if self.is_sharded and self._all_gather_result is None:
            self._note_versions()
        with _no_inference_mode():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Wait for the gather, and make what modules show."""
        with _no_inference_mode():
            super().wait_for_unshard()

    def reshard(self) -> None:
        """Let modules show their shards; keep whole weights only where backward may use them."""
        if self._training_state is not TrainingState.FORWARD:
            super().reshard()
        elif self._reshard_after_forward or not torch.is_grad_enabled():
            self._to_sharded()
        elif self.is_unsharded:
            self._waits = True
            for parameter in self.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)

    def rest(self) -> None:
        """Free whole weights, and those that were gathered ahead and not used."""
        self._training_state = TrainingState.IDLE
        self.finalize_backward()
        self._to_sharded()

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced over the devices yet."""
        self._partial_reduce_output = None
        for parameter in self.fsdp_params:
            _drop_gradient(parameter)

    def _to_sharded(self) -> None:
        self._waits = False
        super()._to_sharded()

    def _init_mp_dtypes(self) -> None:
        super()._init_mp_dtypes()
        if self._orig_dtype is None:  # all are frozen now, which may change
            self._orig_dtype, self._reduce_dtype = self.fsdp_params[0].orig_dtype, self.fsdp_params[0].reduce_dtype

    def _versions_now(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(
            (p.sharded_param._version, p._sharded_local_tensor._version, vars(p.sharded_param).get(_TIMES_DATA, 0))
            for p in self.fsdp_params
        )

    def _note_versions(self) -> None:
        """Let autograd know of weights that were written to since their last gather.

        What it has saved of them for a backward that is still to come is not what it was: it then raises, as it does
        for a model that is not sharded.
        """
        before, self._versions = self._versions, self._versions_now()
        for parameter, (old, *_), (new, *_) in zip(self.fsdp_params, before, self._versions, strict=False):
            if old != new:
                increment_version(_tensors_of(parameter))


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Make tensors that a later training step can use, where an evaluation in inference mode is what gathers first."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _drop_gradient(parameter: FSDPParam) -> None:
    parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


def _tensors_of(parameter: FSDPParam) -> list[torch.Tensor]:
    whole: Any = parameter._unsharded_param
    return [whole, whole._local_tensor] if parameter.is_dtensor else [whole]


class Groups:
    """All groups of a model, which rest between its forwards."""

    def __init__(self, model: nn.Module, units: list[nn.Module]) -> None:
        """Take over the groups of modules that `fully_shard()` has seen.

        Args:
            model: The outermost of them.
            units: All of them.
        """
        self._root: Any = fully_shard.state(model)  # type: ignore[attr-defined]
        self._states: list[Any] = [fully_shard.state(unit) for unit in units]  # type: ignore[attr-defined]
        for group in self._all_groups():
            group.__class__ = Group
            for parameter in group.fsdp_params:
                vars(parameter.sharded_param)[OWNER] = self
        install()
        for unit in units:
            unit.register_forward_pre_hook(self._begin if unit is model else self._begin_part, prepend=True)
        model.register_forward_hook(self._end, always_call=True)

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced over the devices yet."""
        for group in self._all_groups():
            group.drop_gradients()

    def on_data(self, parameter: torch.Tensor) -> None:
        """Count that a script has got a parameter's `data`, which it may write to unseen."""
        vars(parameter)[_TIMES_DATA] = vars(parameter).get(_TIMES_DATA, 0) + 1

    def on_rebound(self, parameter: torch.Tensor) -> None:
        """Let FSDP2 know of a parameter's new shard."""
        self.on_data(parameter)
        self._of_parameter(parameter).reset_sharded_param()

    def on_set_gradient(self, parameter: torch.Tensor) -> None:
        """Forget what an accumulation window holds of a parameter's gradient."""
        _drop_gradient(self._of_parameter(parameter))

    def _of_parameter(self, parameter: torch.Tensor) -> FSDPParam:
        return next(p for group in self._all_groups() for p in group.fsdp_params if p.sharded_param is parameter)

    def _all_groups(self) -> Iterator[Group]:
        return (state._fsdp_param_group for state in self._states if state._fsdp_param_group is not None)

    def _prepare(self) -> None:
        with _no_inference_mode():
            self._root._lazy_init()

    def _begin_part(self, module: nn.Module, args: Any) -> None:
        self._prepare()  # otherwise a unit that is called by itself would take itself for the model

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._prepare()
        if _is_in_backward():  # the model is recomputed
            return
        if self._root._state_ctx.post_backward_final_callback_queued:
            # The last backward has raised, and was never finished.
            self.drop_gradients()
        self._rest()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        has_begun = self._root._is_root is not None
        if has_begun and not _is_in_backward() and not _has_graph(output):  # None after an error
            self._rest()

    def _rest(self) -> None:
        context, streams = self._root._state_ctx, self._root._comm_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        streams.all_gather_state = streams.reduce_scatter_state = None
        streams.post_forward_order.clear()
        for state in self._states:
            state._training_state = TrainingState.IDLE
        for group in self._all_groups():
            group.rest()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _has_graph(output: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
