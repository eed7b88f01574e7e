"""FSDP2's groups of parameters, whose modules show unsharded ones only while a forward or a backward runs.

FSDP2 leaves the root's weights unsharded after a forward, and with SHARD_GRAD_OP those of every unit, as backward needs
them: a script that looks at `model.parameters()` then finds temporary tensors, and what it does to them is lost. Here
modules show their shards again as soon as a unit's forward is over. Unsharded weights that wait for backward do so
hidden, and go where no backward can follow, or another forward begins.

A graph of gradients (`create_graph=True`) has saved unsharded weights that no hook of FSDP2's would gather in time.
They then stay until they change, and gradients are reduced when all of a backward is over.
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from torchacc.engines.native import full_shards
from torchacc.engines.native.gradients import accumulates, take_part_in_backward
from torchacc.engines.native.shard_arithmetic import OWNER, install
from torchacc.engines.patches.private_names import FSDPParam, FSDPParamGroup, TrainingState
from torchacc.errors import EngineError
from torchacc.launch import progress

if TYPE_CHECKING:
    from torchacc.engines.patches.float8_gather import Float8Gathers

Agree = Callable[[Sequence[int]], list[int]]

_TIMES_DATA = "_torchacc_times_data"
"""The attribute that counts how often a script has got a parameter's `data`."""


class Group(FSDPParamGroup):
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
    owner: "Groups"
    _in_window: set[FSDPParam]
    """The parameters of which any process may hold gradients of an accumulation window."""
    _watched: WeakSet[FSDPParam]
    """The parameters whose unsharded weights have a hook that ends a backward."""
    _versions: tuple[tuple[int, int, int], ...] = ()
    """How often each shard had been written to when it was last gathered: by itself, by its memory, or unseen."""

    def unshard(self, async_op: bool = False) -> None:
        """Gather, unless the weights that were kept for this backward are still current."""
        if self._waits:
            if self._may_reuse() and self._versions == self._versions_now():
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
                for parameter in self.fsdp_params:
                    full_shards.show(parameter)
                self._to_unsharded()
                self._all_gather_result = None
                return
            super().wait_for_unshard()

    @cached_property
    def _has_weights(self) -> bool:
        """Whether the shards are full weights, as no other process has a part of them."""
        return full_shards.are_weights(self)

    def reshard(self) -> None:
        """Let modules show their shards; keep unsharded weights only where backward may use them."""
        if self._keeps:
            self._hide()
        elif self._training_state is not TrainingState.FORWARD:
            super().reshard()
        elif self._is_done_after_forward():
            self._to_sharded()
        else:
            self._hide()

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
            if _has_gradient(parameter) or parameter.sharded_param.grad is not None:
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
        used = self.owner.agree_on([int(_has_gradient(each)) for each in trained])
        return [each for each, is_used in zip(trained, used, strict=True) if is_used]

    def rest(self) -> None:
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

    def _hide(self) -> None:
        if self.is_unsharded:
            self._waits = True
            for parameter in self.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced over the devices yet."""
        self._partial_reduce_output = None
        self._in_window.clear()
        for parameter in self.fsdp_params:
            _drop_gradient(parameter)

    def _to_sharded(self) -> None:
        if self._keeps and self._versions == self._versions_now():
            self._hide()
            return
        self._waits = self._keeps = False
        super()._to_sharded()

    def _init_mp_dtypes(self) -> None:
        super()._init_mp_dtypes()
        if self._orig_dtype is None:  # all are frozen now, which may change
            self._orig_dtype, self._reduce_dtype = self.fsdp_params[0].orig_dtype, self.fsdp_params[0].reduce_dtype

    def _versions_now(self) -> tuple[tuple[int, int, int], ...]:
        with _without_own_functions():
            return tuple(
                (p.sharded_param._version, p._sharded_local_tensor._version, vars(p.sharded_param).get(_TIMES_DATA, 0))
                for p in self.fsdp_params
            )

    def _note_versions(self) -> None:
        """Bump the versions, for autograd, of weights that were written to since their last gather.

        What it has saved of them for a backward that is still to come is not what it was: it then raises, as it does
        for a model that is not sharded.
        """
        before, self._versions = self._versions, self._versions_now()
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
    """Hold a context of PyTorch's own work with shards, which `shard_arithmetic.call()` would only make slower."""
    return torch._C.DisableTorchFunctionSubclass()


def _is_trained(parameter: FSDPParam) -> bool:
    weight: Any = parameter._unsharded_param
    return bool(weight.requires_grad and parameter.sharded_param.requires_grad)


def _has_gradient(parameter: FSDPParam) -> bool:
    weight: Any = parameter._unsharded_param
    return weight.grad is not None or parameter.unsharded_accumulated_grad is not None


def _zeros_for(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient of zeros, also for a distributed weight, or one in float8, which has none of its own kind."""
    if hasattr(weight, "to_local"):
        return torch.zeros_like(weight, dtype=dtype)
    return torch.zeros(weight.shape, dtype=dtype, device=weight.device)


def _drop_gradient(parameter: FSDPParam) -> None:
    parameter.unsharded_accumulated_grad = None
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None


def _tensors_of(parameter: FSDPParam) -> list[torch.Tensor]:
    unsharded: Any = parameter._unsharded_param
    return [unsharded, unsharded._local_tensor] if parameter.is_dtensor else [unsharded]


class Groups:
    """All groups of a model."""

    group_class: type[Group] = Group

    def __init__(
        self,
        model: nn.Module,
        units: list[nn.Module],
        agree: Agree | None,
        is_split: bool,
        *,
        float8: Collection[str] = (),
        shard_group: Any = None,
    ) -> None:
        """Take over the groups of modules that `fully_shard()` has seen.

        Args:
            model: The outermost of them.
            units: All of them.
            agree: Returns the largest that any process has of each number of a list; None where there is one process.
            is_split: Whether several processes take part when a unit is gathered.
            float8: Names of the weights that are gathered in float8.
            shard_group: The process group of those that take part; None where that is each by itself.
        """
        self._agree = agree
        self.with_gradient: set[FSDPParam] = set()
        """Parameters that this backward has given a gradient."""
        self._filled_in: dict[FSDPParam, RemovableHandle] = {}
        """Parameters that had none, and have zeros from this backward; the hooks that see a gradient come after all."""
        self._by_parameter: dict[int, FSDPParam] = {}
        """What FSDP2 has of a parameter, by the parameter's id."""
        self._is_split = is_split
        self._gathered = 0
        """A checksum of which groups were gathered since the last backward, in their order."""
        self._root: Any = fully_shard.state(model)  # type: ignore[attr-defined]
        self._states: list[Any] = [fully_shard.state(unit) for unit in units]  # type: ignore[attr-defined]
        for state in self._states:
            state._root_post_backward_final_callback = self._finish_backward
        for number, group in enumerate(self._all_groups()):
            group.__class__ = self.group_class
            group.number, group.is_alone = number, agree is None
            group._watched, group._in_window = WeakSet(), set()
            group.owner = self
            for parameter in group.fsdp_params:
                vars(parameter.sharded_param)[OWNER] = self
        self._float8 = self._gather_in_float8(model, float8, shard_group) if float8 else None
        install()
        take_part_in_backward(self)
        for unit in units:
            unit.register_forward_pre_hook(self._begin if unit is model else self._begin_part, prepend=True)
        model.register_forward_hook(self._end, always_call=True)
        self._gather_for_recorded(model)

    def _gather_in_float8(self, model: nn.Module, names: Collection[str], shard_group: Any) -> "Float8Gathers":
        from torchacc.engines.patches.float8_gather import Float8Gathers

        weights = {id(model.get_parameter(name)) for name in names}
        every = (parameter for group in self._all_groups() for parameter in group.fsdp_params)
        return Float8Gathers([each for each in every if id(each.sharded_param) in weights], shard_group)

    def agree_on(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest that any process has of each number. Collective: every process."""
        return list(numbers) if self._agree is None else self._agree(numbers)

    def note_filled_in(self, parameter: FSDPParam) -> None:
        """Note that a parameter has zeros, which count as its gradient if one comes to the shard itself after them.

        So it does where the parameter is used outside of its unit's forward.
        """

        def note(gradient: torch.Tensor) -> None:
            if accumulates():
                self.with_gradient.add(parameter)

        if parameter not in self._filled_in and parameter.sharded_param.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self._filled_in[parameter] = parameter.sharded_param.register_hook(note)

    def note_gather(self, number: int) -> None:
        """Note that a group is gathered, where others have to do the same: one may evaluate its copy alone."""
        if self._is_split:
            self._gathered = zlib.crc32(number.to_bytes(4, "little"), self._gathered)

    @contextmanager
    def holding_gradients(self) -> Iterator[None]:
        """Hold a context whose backwards keep full gradients, until the first one after it reduces their sum."""
        self._set_reducing(False)
        try:
            yield
        finally:
            self._set_reducing(True)

    def _set_reducing(self, reduces: bool) -> None:
        for group in self._all_groups():
            group.reduce_grads = group.all_reduce_grads = reduces

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced over the devices yet."""
        for group in self._all_groups():
            group.drop_gradients()

    def on_data(self, parameter: torch.Tensor) -> None:
        """Note that a script holds a parameter's `data`, which it may write to without FSDP2's knowledge."""
        vars(parameter)[_TIMES_DATA] = vars(parameter).get(_TIMES_DATA, 0) + 1

    def on_rebound(self, parameter: torch.Tensor) -> None:
        """Hand a parameter's new shard to FSDP2."""
        self.on_data(parameter)
        self._of_parameter(parameter).reset_sharded_param()

    def on_set_gradient(self, parameter: torch.Tensor) -> None:
        """Forget what an accumulation window holds of a parameter's gradient."""
        _drop_gradient(self._of_parameter(parameter))

    def unsharded_weight(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what stands for a parameter in graphs of the model's forward; None before the first."""
        return getattr(self._of_parameter(parameter), "_unsharded_param", None)

    def abandon_backward(self) -> None:
        """Forget the backward that runs, before it raises."""
        self.drop_gradients()
        self._rest()

    def _gather_for_recorded(self, model: nn.Module) -> None:
        """Gather a unit whose gradient begins inside of it, at a tensor that transformers records and returns."""
        recorded = recorded_classes(model)
        states = {module: state for state in self._states for module in state._modules}
        owners = {module: states[unit] for unit in model.modules() if unit in states for module in unit.modules()}
        for module, state in owners.items():
            if module not in states and isinstance(module, recorded):
                module.register_forward_hook(partial(_note_output, state))

    def finish_this_backward(self, weight: torch.Tensor) -> None:
        """Make the running backward reduce, at its end, the gradient that it has given an unsharded weight."""
        self._root._register_root_post_backward_final_callback()

    def _finish_backward(self) -> None:
        self._set_last(True)
        try:
            type(self._root)._root_post_backward_final_callback(self._root)
        finally:
            self._set_last(False)
        if self._agree is not None and all(group.reduce_grads for group in self._all_groups()):
            self._compare_backwards(self._agree)

    def _compare_backwards(self, agree: Agree) -> None:
        """Check that all processes have run the same units, and take zeros back where none has a gradient."""
        every = [parameter for group in self._all_groups() for parameter in group.fsdp_params]
        ran = self._gathered
        largest, negated, *used = agree([ran, -ran, *(int(each in self.with_gradient) for each in every)])
        without = {each for each, is_used in zip(every, used, strict=True) if not is_used}
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, hook in self._filled_in.items():
                hook.remove()
                if parameter in without:
                    parameter.sharded_param.grad = None
        self.with_gradient.clear()
        self._filled_in.clear()
        self._gathered = 0
        if largest != -negated:
            raise EngineError(
                "the processes have run other units of the model than each other since the last backward, in another "
                "order or another number of times, as with layers that are left out at random or by the data. FSDP2 "
                "then takes the weights of one unit for those of another: let every process run all of them and choose "
                "among the outputs, draw such choices from a generator with the same seed, or use config.backend = "
                "'xla' with config.dist.fsdp.use_spmd = True"
            )

    def _set_last(self, is_last: bool) -> None:
        for group in self._all_groups():
            group.is_last = is_last

    def _of_parameter(self, parameter: torch.Tensor) -> FSDPParam:
        found = self._by_parameter.get(id(parameter))
        if found is None or found.sharded_param is not parameter:
            every = (each for group in self._all_groups() for each in group.fsdp_params)
            self._by_parameter = {id(each.sharded_param): each for each in every}
            found = self._by_parameter[id(parameter)]
        return found

    def _all_groups(self) -> Iterator[Group]:
        return (state._fsdp_param_group for state in self._states if state._fsdp_param_group is not None)

    def _prepare(self) -> None:
        with no_inference_mode():
            self._root._lazy_init()

    def _begin_part(self, module: nn.Module, args: Any) -> None:
        self._prepare()  # otherwise a unit that is called by itself would take itself for the model
        if self._root._training_state is TrainingState.IDLE and not _is_in_backward():
            self._update_scales()

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not _is_in_backward():
            progress.mark(progress.Phase.FORWARD)  # before the model's own weights are gathered
        self.begin()

    def begin(self) -> None:
        """Begin a forward of the model, unless it is computed again in backward."""
        self._prepare()
        if _is_in_backward():  # the model is recomputed
            return
        self.end_failed_backward()
        self._rest()
        self._update_scales()

    def _update_scales(self) -> None:
        """Compute the scales of weights that are gathered in float8, which every forward gathers anew."""
        if self._float8 is not None:
            with no_inference_mode():
                self._float8.update_scales()

    def end_failed_backward(self) -> None:
        """Forget a backward that has raised, and so was never finished: modules show their shards again."""
        if self._root._is_root is not None and self._root._state_ctx.post_backward_final_callback_queued:
            self.abandon_backward()

    @contextmanager
    def ending_interrupted(self) -> Iterator[None]:
        """Hold a context in which the model's forward runs, and end it where it is interrupted, as by Ctrl-C.

        Of other errors PyTorch calls the hook.
        """
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._end(None, None, None)
            raise

    def _end(self, module: nn.Module | None, args: Any, output: Any) -> None:
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


def recorded_classes(model: nn.Module) -> tuple[type, ...]:
    """Return the classes of modules whose outputs a model of transformers may return: routers, attentions."""
    found: set[Any] = set()
    for module in model.modules():
        for noted in (getattr(type(module), "_can_record_outputs", None) or {}).values():
            each = noted if isinstance(noted, list | tuple) else [noted]
            found.update(getattr(one, "target_class", one) for one in each)
    return tuple(one for one in found if isinstance(one, type))


def _note_output(state: Any, module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():  # where such a tensor is asked for, nothing is compiled
        return
    state._register_pre_backward_hook(output)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _has_graph(output: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
