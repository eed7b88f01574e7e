"""A model of which this process has one stage: a batch runs through all of them in microbatches."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from torchacc.data import digest_of, tensors_in
from torchacc.engines.clipping import note_total_norm
from torchacc.engines.native import script_reads
from torchacc.engines.native.gradients import accumulates, total_norm
from torchacc.engines.native.missing_output import MissingOutput
from torchacc.engines.native.native_engine import NativeEngine
from torchacc.engines.native.native_model import NativeModel
from torchacc.engines.native.shard_arithmetic import is_of_model
from torchacc.engines.native.split_stages import StageModules, leave_out
from torchacc.engines.native.stage_collectives import StageLink
from torchacc.errors import DataError, EngineError
from torchacc.parallel import sharding
from torchacc.parallel.axes import Role
from torchacc.parallel.plan import ShardingPlan
from torchacc.parallel.sequence_cut import IGNORED, next_labels
from torchacc.parallel.sharding import LocalShard, ShardPlacement

if TYPE_CHECKING:
    from torchacc.engines.native.microbatch_groups import MicrobatchGroups

_SPLIT_INPUTS = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
"""Inputs with a row for each sample; one with a single row, or without rows, is for all of them."""
_OTHER_INPUTS = ("num_items_in_batch", "use_cache")
_OF_LOSS = ("labels", "shift_labels")
_OUTPUTS = ("loss", "logits", "past_key_values")
_COMPARED_FORWARDS = 2
"""Number of first forwards, in training and in evaluation each, whose inputs are compared between stages."""
_WITHOUT = "or set config.dist.pp.size = 1"

_models: "WeakSet[PipelinedModel]" = WeakSet()


class PipelinedModel(NativeModel):
    """A model of which each stage's processes hold, and compute with, a part of the layers."""

    _groups: "MicrobatchGroups"

    def __init__(self, engine: NativeEngine, model: nn.Module, plan: ShardingPlan) -> None:
        super().__init__(engine, model, plan)
        mesh, rank = engine.mesh, engine.job.rank
        group = engine.group.own_subgroup(mesh.groups(Role.PIPELINE))
        assert group is not None
        self._link = StageLink(group, mesh.index(rank, Role.PIPELINE), engine.device)
        self._replicas_of_stage = engine.group.own_subgroup(_groups_of_stages(engine))
        ends = [[ranks[0], ranks[-1]] for ranks in mesh.groups(Role.PIPELINE)]
        self._ends = engine.group.own_subgroup(ends)
        """The processes of the first and of the last stage, which share tied parameters; None in other stages."""
        self._in_window = False
        _models.add(self)

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Shard the modules of this stage, and let those of others pass on what they are given."""
        stage = self._link.stage
        self.absent: list[nn.Parameter] = []
        """The parameters of other stages, without elements."""
        loss: Any = self.model
        self._loss: Callable[..., torch.Tensor] = loss.loss_function
        if self._link.is_last:
            loss.loss_function = self._loss_of_batch
        shards = super()._shard(optimizer)
        shared = [each for each in self.plan.parameters if len(self.plan.pipeline.stages_of(each.names)) > 1]
        held = [each for each in shared if stage in self.plan.pipeline.stages_of(each.names)]
        self._tied = [self.model.get_parameter(each.name) for each in held]
        """Parameters that the first and the last stage both hold, and keep equal."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._tied:
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # also of a frozen one, which may be trained later
                parameter.register_hook(functools.partial(self._share_of_tied, parameter))
                parameter.requires_grad_(is_trained)
        return shards

    @cached_property
    def _own_plan(self) -> ShardingPlan:
        return self.plan.of_stage(self._link.stage)

    @cached_property
    def _root(self) -> nn.Module:
        return _StageRoot(self.model)

    @property
    def _groups_class(self) -> "type[MicrobatchGroups]":
        from torchacc.engines.native.microbatch_groups import MicrobatchGroups

        return MicrobatchGroups

    @property
    def _agree(self) -> Callable[[Sequence[int]], list[int]] | None:
        group = self._replicas_of_stage
        return None if group is None else functools.partial(self.engine.group.all_reduce_max, group=group)

    def _note_total_norm(self) -> None:
        note_total_norm(self, norm_over_stages, knows_its_own=True)

    def on_unscale(self) -> None:
        """Refuse PyTorch's `GradScaler`, by which a stage alone would skip a step where its gradients overflow."""
        raise EngineError(
            f"a GradScaler with a model in {self._link.size} stages (config.dist.pp.size): it looks for infinite "
            "gradients in each stage by itself, so that some would step and others not. Leave it out, as "
            f"config.compute.bf16 needs none, {_WITHOUT}"
        )

    def _prepare_parameters(self) -> None:
        """Leave out the parameters of other stages, and what their modules compute, as split layers or not."""
        self.modules = StageModules(self.model, self.plan, self._link.stage, self._lowered or torch.float32)
        own = {each.name for each in self._own_plan.parameters}
        others = [each for each in self.plan.parameters if each.name not in own]
        mesh = self.engine.parameter_mesh
        script_reads.note_stage(mesh)
        self.absent = leave_out(self.model, others, self.plan, mesh, self.engine.device)

    # ---- A forward

    def _run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run all stages, and give the scalars that the model returns their means over all devices."""
        return super()._run(functools.partial(self._run_stages, inner), args, kwargs)

    def _run_stages(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = self._by_name(inner, args, kwargs)
        config: Any = self.model.config
        is_tuple = given.pop("return_dict", config.return_dict) is False
        self._check_inputs(given)
        self._compare(given)
        self._give_back_gradients()
        self._num_counted = _num_counted(given)
        forward = _Forward(self, inner, given)
        self.modules.is_running = True
        try:
            loss, logits = self._root(forward)
        finally:
            self.modules.is_running = False
        template = forward.output
        unknown = next((name for name in template if name not in _OUTPUTS), None)
        if unknown is not None:
            raise self._refuse(f"the output {unknown!r}")
        if logits is None:
            logits = MissingOutput("logits", _NO_LOGITS)
        others = {} if template.get("past_key_values") is None else {"past_key_values": _NO_CACHE}
        output = type(template)(loss=loss, logits=logits, **others)
        return output.to_tuple() if is_tuple else output

    def _by_name(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
        signature = inspect.signature(type(self.model).forward)
        bound = signature.bind(self.model, *args, **kwargs).arguments
        bound.pop("self")
        variable = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        more = bound.pop(variable, {}) if variable is not None else {}
        return {name: value for name, value in {**bound, **more}.items() if value is not None}

    def _check_inputs(self, given: dict[str, Any]) -> None:
        """Refuse inputs of which it is not known what they are to a stage.

        Raises:
            EngineError: There is one, or gradients are recorded of a call without labels.
        """
        ids = given.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not len(ids):
            raise self._refuse("a call without input_ids of shape (rows, tokens)")
        for name in ("logits_to_keep", "output_attentions", "output_hidden_states"):
            if isinstance(given.get(name), bool | int) and not given[name]:
                given.pop(name)
        for name, value in given.items():
            if name not in (*_SPLIT_INPUTS, *_OTHER_INPUTS):
                raise self._refuse(f"the input {name!r}")
            if name in _SPLIT_INPUTS and not isinstance(value, torch.Tensor):
                raise self._refuse(f"{name} that is a {type(value).__name__}")
            if name in _OF_LOSS and value.shape != ids.shape:
                raise self._refuse(f"{name} of shape {tuple(value.shape)} for input_ids of {tuple(ids.shape)}")
        if torch.is_grad_enabled() and "labels" not in given:
            raise EngineError(
                f"a call without labels that records gradients, of a model in {self._link.size} stages "
                "(config.dist.pp.size): only the last stage has logits, so that the model has to compute the loss. "
                "Pass labels, or call it under torch.no_grad(), where all ranks get the logits"
            )

    def _refuse(self, what: str) -> EngineError:
        return EngineError(
            f"{type(self.model).__name__} with {what}, where the model is in {self._link.size} stages "
            f"(config.dist.pp.size): leave it out, {_WITHOUT}. To generate, load a checkpoint with dist.pp.size = 1"
        )

    @cached_property
    def _left_to_compare(self) -> dict[bool, int]:
        return {True: _COMPARED_FORWARDS, False: _COMPARED_FORWARDS}

    def _compare(self, given: Mapping[str, Any]) -> None:
        """Check in the first forwards that all stages are given the same. Collective: all stages.

        Raises:
            DataError: They are not.
        """
        is_training = self.model.training
        if not self._left_to_compare[is_training]:
            return
        self._left_to_compare[is_training] -= 1
        own = digest_of([sorted(given), *(each.detach().cpu() for each in tensors_in(dict(given)))])
        if not self._link.compare(own):
            raise DataError(
                f"the {self._link.size} stages (config.dist.pp.size) have called {type(self.model).__name__} with "
                "different inputs: a batch runs through all of them. Hand the loader over to accelerate(), which gives "
                "them the same batch, and draw random numbers for it by a generator with the same seed on all ranks"
            )

    def _loss_of_batch(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand for the model's loss function: the microbatch's sum, over the labels that count in all of the batch."""
        return self._loss(logits, labels, *args, **{**kwargs, "num_items_in_batch": self._num_counted})

    def note_more(self, has_more: bool) -> None:
        """Note whether another microbatch follows the one that runs next, for which weights stay gathered."""
        self._groups.has_more = has_more

    # ---- Gradients

    def begin_backward(self) -> None:
        """Prepare for the gradients of a backward, as the first node of its graph.

        Raises:
            EngineError: It is not `loss.backward()`.
        """
        if not accumulates():
            raise EngineError(_NO_GRAD)
        self._give_back_gradients()
        # FSDP2 queues the end of its own backward before, where the gradient of the loss arrives.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._tied:
                self._gradients_before[parameter] = parameter.grad
                parameter.grad = None

    @cached_property
    def _gradients_before(self) -> dict[nn.Parameter, torch.Tensor | None]:
        """The gradients that tied parameters had before the backward that runs."""
        return {}

    def _share_of_tied(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Halve what comes to a tied parameter from outside of the model, on both stages, where it will be summed."""
        return gradient / 2 if parameter in self._gradients_before and not self._in_window else gradient

    def _give_back_gradients(self) -> None:
        """Take back what a backward that has raised had begun with."""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, before in self._gradients_before.items():
                parameter.grad = before
        self._gradients_before.clear()

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Sum the gradients of tied parameters over the stages that hold them."""
        self._link.finish()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, before in self._gradients_before.items():
                if self._in_window or not parameter.requires_grad:
                    parameter.grad = before
                    continue
                new: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(new.to_local(), group=self._ends)
                parameter.grad = new if before is None else before.add_(new)
        self._gradients_before.clear()

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        self._in_window = True
        try:
            with super()._hold_gradients():
                yield
        finally:
            self._in_window = False

    def norm_of_all(self, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        """Return the norm of full gradients, or parameters, over all stages, those of tied ones once. Collective."""
        if norm_type <= 0:
            raise EngineError(
                f"clip_grad_norm_(norm_type={norm_type}) of a model in stages (config.dist.pp.size): their norms are "
                "put together for orders above 0: choose one, such as 2.0"
            )
        tied = self._tied if self._link.is_last else []
        elsewhere = {id(each) for each in tied} | {id(each.grad) for each in tied}
        counted = [gradient for gradient in gradients if id(gradient) not in elsewhere]
        own = total_norm(counted, norm_type) if counted else None
        return self._link.combined_norm(torch.zeros((), device=self.engine.device) if own is None else own, norm_type)

    # ---- Who holds what

    @cached_property
    def placement(self) -> ShardPlacement:
        """This process's place among those of all stages."""
        mesh, rank = self.engine.mesh, self.engine.job.rank
        held_by, copies = (Role.PIPELINE, Role.SHARD, Role.TENSOR), Role.REPLICATE
        return ShardPlacement(
            processes_per_replica=mesh.size(*held_by),
            shard_index=mesh.index(rank, *held_by),
            num_replicas=mesh.size(copies),
            replica=mesh.index(rank, copies),
            is_contiguous=False,
        )

    @cached_property
    def _names_of(self) -> dict[str, tuple[str, ...]]:
        return {planned.name: planned.names for planned in self.plan.parameters}

    def replica_of(self, local_shard: LocalShard) -> tuple[int, int]:
        """Return this process's place among those with the same shard, which of a tied parameter are in two stages."""
        index, count = super().replica_of(local_shard)
        stages = self.plan.pipeline.stages_of(self._names_of[local_shard.names[0]])
        place = stages.index(self._link.stage) if self._link.stage in stages else 0
        return index * len(stages) + place, count * len(stages)

    def _shard_of(self, name: str, shape: tuple[int, ...], rank: int) -> LocalShard:
        mesh, stages = self.engine.mesh, self.plan.pipeline.stages_of(self._names_of[name])
        shard = super()._shard_of(name, shape, rank)
        return shard if mesh.index(rank, Role.PIPELINE) in stages else sharding.without_elements(shard, mesh)

    def local_numel(self) -> int:
        """Return the number of parameter elements that this process holds at rest."""
        own = {each.name for each in self._own_plan.parameters}
        return sum(shard.shard_numel for shard in self.local_shards.values() if shard.key in own)


class _StageRoot(nn.Module):
    """What FSDP2 takes for the model, so that one forward of it, and one backward, is that of all microbatches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]]) -> Any:
        return run()


class _Forward:
    """One forward of all microbatches of a batch.

    Args:
        owner: The model.
        inner: Its own forward.
        given: The inputs of the batch by name.
    """

    def __init__(self, owner: PipelinedModel, inner: Callable[..., Any], given: Mapping[str, Any]) -> None:
        self._owner = owner
        self._link = owner._link
        self._inner = inner
        self._given = given
        self.output: Any = None
        """What the model's forward has returned of the last microbatch."""

    def __call__(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the loss of the batch, where there are labels, and its logits, where no gradients are recorded."""
        records, outputs = torch.is_grad_enabled(), []
        microbatches = list(self._microbatches())
        try:
            for number, microbatch in enumerate(microbatches):
                self._owner.note_more(number + 1 < len(microbatches))
                outputs.append(self._run(number, microbatch))
        finally:
            self._owner.note_more(False)
        loss = self._loss(outputs) if "labels" in self._given else None
        logits = None
        if not records:
            own = torch.cat([output.logits for output in outputs]) if self._link.is_last else None
            logits = self._link.from_last(own)
        self._link.finish()
        return loss, logits

    def _microbatches(self) -> Iterator[dict[str, Any]]:
        rows = len(self._given["input_ids"])
        count = min(rows, self._owner.plan.pipeline.num_microbatches)
        parts: dict[str, Any] = {}
        for name, value in self._given.items():
            is_split = name in _SPLIT_INPUTS and value.dim() > 1 and len(value) == rows
            parts[name] = value.tensor_split(count) if is_split else [value] * count
        for number in range(count):
            yield {name: parts[name][number] for name in parts if name != "num_items_in_batch"}

    def _run(self, number: int, microbatch: dict[str, Any]) -> Any:
        """Run one microbatch; return the last stage's output, or what stands in the graph for what is sent."""
        link, modules = self._link, self._owner.modules
        if not link.is_first:
            config: Any = self._owner.model.config
            if number == 0:
                self._dtype = link.receive_dtype()
            modules.received = link.receive((*microbatch["input_ids"].shape, config.hidden_size), self._dtype, number)
        if not link.is_last:
            microbatch = {name: value for name, value in microbatch.items() if name not in _OF_LOSS}
        output = self.output = self._inner(**microbatch, return_dict=True)
        hidden, modules.received, modules.computed = modules.computed, None, None
        if link.is_last:
            return output
        assert hidden is not None, "a layer of the next stage has been called"
        if number == 0:
            link.send_dtype(hidden.dtype)
        return link.send(hidden, number)

    def _loss(self, outputs: Sequence[Any]) -> torch.Tensor:
        """Return the loss of the batch, from which backward goes to the microbatches of this stage."""
        losses = [output.loss for output in outputs] if self._link.is_last else list(outputs)
        total: Any = sum(each.detach() for each in losses)  # zero, of what is sent
        value = self._link.scalar_from_last(total)
        absent = [each for each in self._owner.absent if each.requires_grad]
        loss: torch.Tensor = _WithGraphs.apply(value, self._owner, len(losses), *losses, *absent)
        return loss


class _WithGraphs(torch.autograd.Function):
    """Give a loss the graphs of this stage's microbatches, and the parameters of other stages gradients of nothing."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, owner: PipelinedModel, num_losses: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.how = owner, num_losses, tensors[num_losses:]
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        owner, num_losses, absent = ctx.how
        owner.begin_backward()
        return (None, None, None, *[gradient] * num_losses, *[torch.zeros_like(each) for each in absent])


def _groups_of_stages(engine: NativeEngine) -> list[list[int]]:
    """Return the processes of each stage."""
    return engine.mesh.groups(*(role for role in Role if role is not Role.PIPELINE))


def _num_counted(given: Mapping[str, Any]) -> Any:
    """Return the number by which the sum of a batch's losses is divided; None without labels."""
    if given.get("num_items_in_batch") is not None:
        return given["num_items_in_batch"]
    if "labels" not in given:
        return None
    shifted = given.get("shift_labels")
    return (next_labels(given["labels"]) if shifted is None else shifted).ne(IGNORED).sum()


def norm_over_stages(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    """Return the norm of full gradients, or parameters, of all stages; None of those of other models. Collective."""
    given = {id(gradient) for gradient in gradients}
    for model in _models:
        if any({id(parameter), id(parameter.grad)} & given for parameter in model.model.parameters()):
            return model.norm_of_all(gradients, norm_type)
    # Of copies it is not known what they are of: the norm that other models ask for would be this stage's.
    script_reads.refuse_other_stages("get_total_norm", [each for each in gradients if is_of_model(each)])
    return None


_NO_LOGITS = (
    "the logits of a forward that records gradients are on the last stage only (config.dist.pp.size): call the model "
    "under torch.no_grad(), where all ranks get them"
)
_NO_CACHE = MissingOutput(
    "past_key_values",
    "the past_key_values of a model in stages (config.dist.pp.size) were not kept: each stage has those of its own "
    "layers. To generate, load a checkpoint with dist.pp.size = 1",
)
_NO_GRAD = (
    "torch.autograd.grad() through a model in stages (config.dist.pp.size): a parameter's gradient is computed by one "
    "of them, and all have to take part. Call loss.backward(), and read parameter.grad"
)
