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
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from torchacc.engines.native import shard_arithmetic
from torchacc.engines.native.fsdp_group import TIMES_DATA, FSDPGroup, drop_gradient, has_gradient, no_inference_mode
from torchacc.engines.native.gradients import accumulates, take_part_in_backward
from torchacc.engines.native.shard_arithmetic import OWNER
from torchacc.engines.patches import torch_patches
from torchacc.engines.patches.private_names import FSDPParam, TrainingState
from torchacc.engines.status import ModelStatus
from torchacc.errors import EngineError
from torchacc.launch import progress

if TYPE_CHECKING:
    from torchacc.engines.patches.float8_gather import Float8Gathers

Agree = Callable[[Sequence[int]], list[int]]


class FSDPGroups:
    """All groups of a model."""

    group_class: type[FSDPGroup] = FSDPGroup

    def __init__(
        self,
        model: nn.Module,
        units: list[nn.Module],
        agree: Agree | None,
        is_split: bool,
        *,
        float8: Collection[nn.Parameter] = (),
        shard_group: Any = None,
        status: ModelStatus,
    ) -> None:
        """Take over the groups of modules that `fully_shard()` has seen.

        Args:
            model: The outermost of them.
            units: All of them.
            agree: Returns the largest that any process has of each number of a list; None where there is one process.
            is_split: Whether several processes take part when a unit is gathered.
            float8: The weights that are gathered in float8.
            shard_group: The process group of those that take part; None where that is each by itself.
            status: The model's.
        """
        self._agree = agree
        self._status = status
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
        self._float8 = self._gather_in_float8(float8, shard_group) if float8 else None
        _install()
        take_part_in_backward(self)
        for unit, state in zip(units, self._states, strict=True):
            unit.register_forward_pre_hook(self._begin if unit is model else self._begin_part, prepend=True)
            unit.register_forward_hook(partial(_watch_base, state), with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        self._gather_for_recorded(model)

    def _gather_in_float8(self, float8: Collection[nn.Parameter], shard_group: Any) -> "Float8Gathers":
        from torchacc.engines.patches.float8_gather import Float8Gathers

        weights = set(map(id, float8))
        own = [each for each in self._all_parameters() if id(each.sharded_param) in weights]
        return Float8Gathers(own, shard_group)

    def versions(self) -> list[tuple[int, int]]:
        """Return how often each parameter has been written to, as far as PyTorch knows."""
        return [version[:2] for group in self._all_groups() for version in group.versions_now()]

    def agree_on(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest that any process has of each number. Collective: every process."""
        return list(numbers) if self._agree is None else self._agree(numbers)

    def note_filled_in(self, parameter: FSDPParam) -> None:
        """Record that a parameter has zeros, which count as its gradient if one comes to the shard itself after them.

        So it does where the parameter is used outside of its unit's forward.
        """

        def note(gradient: torch.Tensor) -> None:
            if accumulates():
                self.with_gradient.add(parameter)

        if parameter not in self._filled_in and parameter.sharded_param.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self._filled_in[parameter] = parameter.sharded_param.register_hook(note)

    def note_gather(self, number: int) -> None:
        """Record that a group is gathered, where others have to do the same: one may evaluate its copy alone."""
        if self._is_split:
            self._gathered = zlib.crc32(number.to_bytes(4, "little"), self._gathered)

    @contextmanager
    def holding_gradients(self) -> Iterator[None]:
        """Context manager whose backwards keep full gradients, until the first one after it reduces their sum."""
        self._set_reducing(False)
        try:
            yield
        finally:
            self._set_reducing(True)

    def _set_reducing(self, reduces: bool) -> None:
        for group in self._all_groups():
            group.reduce_grads = group.all_reduce_grads = reduces

    def sum_gradients(self) -> None:
        """Add the gradients that unsharded weights were given outside of a backward to those that wait."""
        for group in self._all_groups():
            group.sum_gradients()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce the gradients that wait, as the end of a backward does."""
        self._finish_backward()

    def drop_gradients(self) -> None:
        """Forget gradients that are not reduced over the devices yet."""
        for group in self._all_groups():
            group.drop_gradients()

    def on_data(self, parameter: torch.Tensor) -> None:
        """Record that a script holds a parameter's `data`, which it may write to without FSDP2's knowledge."""
        vars(parameter)[TIMES_DATA] = vars(parameter).get(TIMES_DATA, 0) + 1

    def on_rebound(self, parameter: torch.Tensor) -> None:
        """Hand a parameter's new shard to FSDP2."""
        self.on_data(parameter)
        self._of_parameter(parameter).reset_sharded_param()

    def on_set_gradient(self, parameter: torch.Tensor) -> None:
        """Forget what an accumulation window holds of a parameter's gradient."""
        self._status.on_set_gradient(parameter)
        drop_gradient(self._of_parameter(parameter))

    def holds_gradient(self, parameter: torch.Tensor) -> bool:
        """Return whether an accumulation window holds gradients of a parameter."""
        return has_gradient(self._of_parameter(parameter))

    def unsharded_weight(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what stands for a parameter in graphs of the model's forward; None before the first."""
        return getattr(self._of_parameter(parameter), "_unsharded_param", None)

    def abandon_backward(self, *, accumulates: bool = True) -> None:
        """Forget the backward that runs, before it raises.

        Args:
            accumulates: Whether it adds to the gradients of parameters; else those of a window are lost alone.
        """
        lost = [each.sharded_param for each in self._all_parameters() if accumulates or has_gradient(each)]
        self._status.on_lost_gradients(each for each in lost if each.requires_grad)
        self.drop_gradients()
        self._free_unsharded()

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
        every = list(self._all_parameters())
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
            self._by_parameter = {id(each.sharded_param): each for each in self._all_parameters()}
            found = self._by_parameter[id(parameter)]
        return found

    def _all_groups(self) -> Iterator[FSDPGroup]:
        return (state._fsdp_param_group for state in self._states if state._fsdp_param_group is not None)

    def _all_parameters(self) -> Iterator[FSDPParam]:
        return (parameter for group in self._all_groups() for parameter in group.fsdp_params)

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
        """Begin a forward of the model, unless it is recomputed in backward."""
        self._prepare()
        if _is_in_backward():  # the model is recomputed
            return
        self.end_failed_backward()
        self._free_unsharded()
        self._update_scales()

    def _update_scales(self) -> None:
        """Compute the scales of weights that are gathered in float8, which every forward gathers anew."""
        if self._float8 is not None:
            with no_inference_mode():
                self._float8.update_scales()

    def end_failed_backward(self, *, accumulates: bool = True) -> None:
        """Forget a backward that has raised, and so was never finished: modules show their shards again."""
        if self._root._is_root is not None and self._root._state_ctx.post_backward_final_callback_queued:
            self.abandon_backward(accumulates=accumulates)

    @contextmanager
    def ending_interrupted(self) -> Iterator[None]:
        """Context manager of the model's forward, which ends it where it is interrupted, as by Ctrl-C.

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
            self._free_unsharded()

    def _free_unsharded(self) -> None:
        context, streams = self._root._state_ctx, self._root._comm_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        streams.all_gather_state = streams.reduce_scatter_state = None
        streams.post_forward_order.clear()
        for state in self._states:
            state._training_state = TrainingState.IDLE
        for group in self._all_groups():
            group.free_unsharded()


@cache
def _install() -> None:
    """Patch PyTorch for groups, until the process ends."""
    shard_arithmetic.install()
    torch_patches.hold_until_exit(torch_patches.ranges_while_profiling())


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


def _watch_base(state: Any, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Gather a unit in backward also where its output is a view, as that of a linear layer, that is written to.

    PyTorch then computes the gradient of the output's base without that of the output, where FSDP2 waits.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    views = [leaf for leaf in _tensors(output) if leaf.requires_grad and leaf._base is not None]
    if views:
        # The gradient of what the unit was given comes after those of its parameters.
        given = {id(leaf if leaf._base is None else leaf._base) for leaf in _tensors((args, kwargs))}
        bases = [leaf._base for leaf in views if leaf._base.grad_fn is not None and id(leaf._base) not in given]
        state._register_pre_backward_hook(bases)


def _tensors(tree: Any) -> Iterator[Any]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _has_graph(output: Any) -> bool:
    return any(leaf.requires_grad for leaf in _tensors(output))
