"""A model of which this process has one stage: a batch runs through all of them in microbatches."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from torchacc.engines.clipping import register_total_norm
from torchacc.engines.forward_inputs import CACHES, inputs_by_name
from torchacc.engines.native import expert_parallel, full_shards, script_reads, stage_inputs
from torchacc.engines.native.gradients import accumulates, is_graph_kept, total_norm
from torchacc.engines.native.missing_output import MissingOutput
from torchacc.engines.native.native_engine import NativeEngine
from torchacc.engines.native.native_model import NativeModel
from torchacc.engines.native.native_shards import StageShards, local_tensor
from torchacc.engines.native.shard_arithmetic import is_of_model
from torchacc.engines.native.split_backward import SplitBackward
from torchacc.engines.native.split_stages import StageModules, language_model, leave_out
from torchacc.engines.native.stage_collectives import StageLink, num_groups
from torchacc.engines.native.stage_schedules import (
    Microbatches,
    check_backward,
    check_hooks,
    run_forwards,
    run_forwards_and_backwards,
)
from torchacc.errors import EngineError
from torchacc.parallel.axes import Role
from torchacc.parallel.plan import ShardingPlan

if TYPE_CHECKING:
    from torchacc.engines.native.microbatch_groups import MicrobatchGroups

_OUTPUTS = ("loss", "logits", *CACHES)
_BITS_OF_ONE = 0x3F800000
"""Those of 1 as a float32."""
_WITHOUT = "or set config.dist.pp.size = 1"

_models: "WeakSet[PipelinedModel]" = WeakSet()


class PipelinedModel(NativeModel):
    """A model of which each stage's processes hold, and compute with, a part of the layers."""

    _groups: "MicrobatchGroups"

    def __init__(self, engine: NativeEngine, model: nn.Module, plan: ShardingPlan) -> None:
        super().__init__(engine, model, plan)
        mesh, rank = engine.mesh, engine.job.rank
        stages = mesh.groups(Role.PIPELINE)
        copies = range(num_groups(plan.pipeline, engine.device))
        groups = [group for copy in copies if (group := engine.group.own_subgroup(stages, copy)) is not None]
        self.link = StageLink(plan.pipeline, groups, mesh.index(rank, Role.PIPELINE), engine.device)
        self._compared = stage_inputs.ComparedInputs(self.link, type(model).__name__)
        self._replicas_of_stage = engine.group.own_subgroup(_groups_of_stages(engine))
        ends = [[ranks[0], ranks[-1]] for ranks in stages]
        self._ends = engine.group.own_subgroup(ends)
        """The processes of the first and of the last stage, which share tied parameters; None in other stages."""
        self._in_window = False
        self._split_backward = SplitBackward(model) if plan.pipeline.splits_backward else None
        _models.add(self)

    @cached_property
    def shards(self) -> StageShards:
        """What this process holds of the parameters: those of its stage."""
        return StageShards(self.engine, self.model, self.plan)

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> dict[torch.Tensor, nn.Parameter]:
        """Shard the modules of this stage, and let those of others pass on what they are given."""
        pipeline, place = self.plan.pipeline, self.link.place
        self.absent: list[nn.Parameter] = []
        """The parameters of other stages, without elements."""
        shards = super()._shard(optimizer)
        shared = [each for each in self.plan.parameters if len(pipeline.places_of(each.names)) > 1]
        held = [each for each in shared if place in pipeline.places_of(each.names)]
        self.shared = [self.model.get_parameter(each.name) for each in shared]
        """Parameters that the first and the last stage share, on all stages."""
        self._tied = [self.model.get_parameter(each.name) for each in held]
        """Parameters that the first and the last stage both hold, and keep equal."""
        return shards

    @cached_property
    def _own_plan(self) -> ShardingPlan:
        return self.plan.of_stages(self.plan.pipeline.stages_at(self.link.place))

    @cached_property
    def _language_model(self) -> Any:
        return language_model(self.model)

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

    @property
    def _losses_differ(self) -> bool:
        """Whether processes may have other losses: all stages have that of the last one."""
        return self._replicas_of_stage is not None

    def _returns_outputs(self) -> bool:
        return self.modules.runs_last

    def _register_total_norm(self) -> None:
        register_total_norm(self, norm_over_stages, knows_its_own=True)

    def on_unscale(self) -> None:
        """Refuse PyTorch's `GradScaler`, by which a stage alone would skip a step where its gradients overflow."""
        raise EngineError(
            f"a GradScaler with a model in {self.link.num_stages} stages (config.dist.pp.size): it looks for infinite "
            "gradients in each stage by itself, so that some would step and others not. Leave it out, as "
            f"config.compute.bf16 needs none, {_WITHOUT}"
        )

    def _compile_units(self) -> None:
        """Compile what is to be, the loss of a microbatch with it, of which this model then counts the labels."""
        super()._compile_units()
        model = self._language_model
        self._loss: Callable[..., torch.Tensor] = model.loss_function
        if self.link.has_last:
            model.loss_function = self._loss_of_batch

    def _prepare_parameters(self) -> None:
        """Leave out the parameters of other stages, and what their modules compute, as split layers or not."""
        self.modules = StageModules(self.model, self.plan.pipeline, self.link.place, self._lowered or torch.float32)
        own = {each.name for each in self._own_plan.parameters}
        others = [each for each in self.plan.parameters if each.name not in own]
        mesh = self.engine.parameter_mesh
        script_reads.note_stages(mesh, self.link)
        self.absent = leave_out(self.model, others, self.plan, mesh, self.engine.device)

    # ---- A forward

    def _run(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run all stages, and give the scalars that the model returns their means over all devices."""
        return super()._run(functools.partial(self._run_stages, inner), args, kwargs)

    def _run_stages(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._is_trained() else torch.no_grad():
            return self._run_batch(inner, *args, **kwargs)

    def _is_trained(self) -> bool:
        """Return whether a parameter of any stage is trained; without one the loss has no graph, as in one process."""
        with torch._C.DisableTorchFunctionSubclass():  # an attribute of a distributed tensor is a call in Python
            return any(parameter.requires_grad for parameter in self.model.parameters())

    def _run_batch(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = self._by_name(args, kwargs)
        config = self._language_model.config
        is_tuple = given.pop("return_dict", config.return_dict) is False
        if getattr(config, "output_router_logits", False):
            raise self._refuse("config.output_router_logits = True, set after accelerate()")
        stage_inputs.check(given, self._refuse)
        self._compared.check(given, is_training=self.model.training)
        self._num_counted = stage_inputs.num_counted(given)
        if torch.is_grad_enabled():
            check_backward(self)
        self.link.begin_batch()
        microbatches = Microbatches(self, inner, given)
        if self.plan.experts and self._agree is not None:
            expert_parallel.check_microbatches(len(microbatches), self._agree)
        loss: torch.Tensor | None = None
        logits: Any = None
        if torch.is_grad_enabled() and self.plan.pipeline.runs_backward_early:
            loss = run_forwards_and_backwards(microbatches)
        else:
            loss, logits = run_forwards(microbatches)
        made, names = microbatches.output_type, microbatches.output_names
        unknown = next((name for name in names if name not in _OUTPUTS), None)
        if unknown is not None:
            raise self._refuse(f"the output {unknown!r}")
        if logits is None:
            logits = MissingOutput("logits", _NO_LOGITS if torch.is_grad_enabled() else _NO_LOGITS_IN_CHUNKS)
        others = {name: _NO_CACHE for name in CACHES if name in names}
        assert made is not None
        output = made(loss=loss, logits=logits, **others)
        return output.to_tuple() if is_tuple else output

    def _by_name(self, args: Any, kwargs: Any) -> dict[str, Any]:
        signature = inspect.signature(type(self.model).forward)
        if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):  # adapters of no task: as without
            signature = inspect.signature(type(self._language_model).forward)
        given = inputs_by_name(signature, self.model, *args, **kwargs)
        return {name: value for name, value in given.items() if name != "self"}

    def _refuse(self, what: str, *, is_cache: bool = False) -> EngineError:
        to_generate = ". To generate, load a checkpoint with dist.pp.size = 1" if is_cache else ""
        return EngineError(
            f"{type(self.model).__name__} with {what}, where the model is in {self.link.num_stages} stages "
            f"(config.dist.pp.size): leave it out, {_WITHOUT}{to_generate}"
        )

    def _loss_of_batch(self, logits: Any, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand for the model's loss function: the microbatch's sum, over the labels that count in all of the batch."""
        return self._loss(logits, labels, *args, **{**kwargs, "num_items_in_batch": self._num_counted})

    def run_root(self, run: Callable[[], Any]) -> Any:
        """Run a function as one forward of what FSDP2 takes for the model."""
        return self._root(run)

    @contextmanager
    def keeping_weights(self, *, until_backward: bool, ahead: bool) -> Iterator[None]:
        """Context manager in which each unit is gathered once, for all microbatches: see `MicrobatchGroups`."""
        with self._groups.keeping_weights(until_backward=until_backward, ahead=ahead):
            yield

    def weight_versions(self) -> list[tuple[int, int]]:
        """Return how often each weight of this stage has been written to."""
        return self._groups.versions()

    # ---- Gradients

    def run_backwards(self, losses: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
        """Run the backwards of all microbatches, from the last to the first, inside of a script's own backward.

        Args:
            losses: Of each microbatch its loss, or what stands in the graph for what is sent.
            gradient: That of their sum.

        Raises:
            EngineError: The backward is not `loss.backward()`.
        """
        _check_accumulates()
        keeps_graph = is_graph_kept()
        kept = self.keeping_weights(until_backward=False, ahead=not self.link.has_last)
        with nullcontext() if self._in_window else self._summing_tied(), kept:
            try:
                for number in reversed(range(len(losses))):
                    self.run_backward(losses[number], gradient, is_last=not number, keeps_graph=keeps_graph)
            except BaseException:
                self._groups.abandon_backward()  # with the gradients of the microbatches before
                raise
        self.link.finish()
        self._fill_in_absent()

    def run_backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        is_last: bool,
        keeps_graph: bool = False,
    ) -> None:
        """Run the backward of a microbatch.

        Args:
            loss: Its loss, or what stands in the graph for what is sent.
            gradient: That of the loss; None for 1.
            is_last: Whether it is the last of the batch, after which gradients are reduced.
            keeps_graph: Whether another backward of the same graph may follow.
        """
        is_held = self._in_window and not self.plan.pipeline.runs_backward_early
        with nullcontext() if is_last or is_held else super()._hold_gradients():
            torch.autograd.backward(loss, gradient, retain_graph=keeps_graph)

    @contextmanager
    def splitting_backward(self, number: int) -> Iterator[None]:
        """Context manager in which the backward of a microbatch leaves what `compute_weight_gradients()` computes."""
        with nullcontext() if self._split_backward is None else self._split_backward.splitting(number):
            yield

    def compute_weight_gradients(self, number: int, *, is_last: bool) -> None:
        """Compute the gradients of weights that the backward of a microbatch has left.

        Args:
            number: The number of the microbatch.
            is_last: Whether it is the last of the batch, after which gradients are reduced.
        """
        assert self._split_backward is not None
        self._split_backward.compute(number)
        self._groups.sum_gradients()
        if is_last:
            self._groups.reduce_gradients()

    @contextmanager
    def _summing_tied(self) -> Iterator[None]:
        """Context manager of a backward, which sums gradients of tied parameters over the stages that hold them."""
        # What is frozen by now may have gradients of a window's earlier backwards.
        tied = [each for each in self._tied if each.requires_grad or self._groups.holds_gradient(each)]
        with self._setting_aside(tied) as computed:
            yield
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter in tied:
                new = self._sum_over_ends(parameter, computed.get(parameter))
                parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)

    @contextmanager
    def _setting_aside(self, parameters: Sequence[nn.Parameter]) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
        """Context manager in which parameters have no gradients at first; it collects those that they have at its end.

        Yields:
            What is collected; `parameter.grad` is as it was afterwards.
        """
        computed: dict[nn.Parameter, torch.Tensor] = {}
        with torch._C.DisableTorchFunctionSubclass():
            before = {each: each.grad for each in parameters}
            for parameter in before:
                parameter.grad = None
        try:
            yield computed
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                computed.update({each: each.grad for each in before if each.grad is not None})
                for parameter, gradient in before.items():
                    parameter.grad = gradient

    @torch.no_grad()
    def _sum_over_ends(self, parameter: nn.Parameter, own: torch.Tensor | None) -> torch.Tensor:
        """Return the sum of a tied parameter's gradients over the stages that hold it. Collective: those stages."""
        new: Any = torch.zeros_like(parameter) if own is None else own
        dist.all_reduce(new.to_local(), group=self._ends)
        return new  # type: ignore[no-any-return]

    @contextmanager
    def computing_gradients(self) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
        """Context manager in which backward runs inside of a forward; it collects at its end what that has computed.

        Yields:
            What will be the gradient of each parameter of this stage; `parameter.grad` is as it was afterwards.
        """
        absent = set(self.absent)
        with self._setting_aside([each for each in self.model.parameters() if each not in absent]) as computed:
            try:
                yield computed
            except BaseException:
                self._groups.drop_gradients()  # of the microbatches before
                if self._split_backward is not None:
                    self._split_backward.clear()
                raise
        for parameter in self._tied:
            if parameter.requires_grad:
                computed[parameter] = self._sum_over_ends(parameter, computed.get(parameter))

    @torch.no_grad()
    def add_gradients(
        self,
        computed: Mapping[nn.Parameter, torch.Tensor],
        scale: torch.Tensor,
        versions: Sequence[tuple[int, int]],
        *,
        may_keep: bool,
    ) -> None:
        """Add what a forward has computed to the gradients. Collective: every process.

        Args:
            computed: Gradients of the loss.
            scale: That of what the script has made of the loss.
            versions: What `weight_versions()` was then.
            may_keep: Whether the tensors may become the parameters' gradients, as nobody else needs them.

        Raises:
            EngineError: Processes scale differently, whose gradients are averaged already; weights have changed; or it
                is no `backward()`.
        """
        _check_accumulates()
        bits = int(scale.float().view(torch.int32))
        changed = int(self.weight_versions() != versions)
        compared = self.engine.group.begin_all_reduce_max([bits, -bits, changed])
        # What needs no answer is done while the processes exchange theirs.
        check_hooks(self)
        self._fill_in_absent()
        largest, negated, has_changed = compared()
        if has_changed:
            raise EngineError(
                "weights have changed between a forward and its backward(), as by optimizer.step(), with "
                f"config.dist.pp.schedule = {self.plan.pipeline.schedule!r}, which computes gradients in the forward: "
                "they would be those of the old weights. Change weights after backward(), or set schedule = 'gpipe'"
            )
        if largest != -negated:
            raise EngineError(
                f"the processes scale the loss differently, this one by {float(scale):.6g}, with "
                f"config.dist.pp.schedule = {self.plan.pipeline.schedule!r}, where gradients are averaged before: "
                "scale it alike on all, leave the number of labels that count to the model (num_items_in_batch), or "
                "set schedule = 'gpipe'"
            )
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, gradient in computed.items():
                if not parameter.requires_grad:  # any more
                    continue
                new = gradient if may_keep and largest == _BITS_OF_ONE else gradient * scale
                parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)

    @torch.no_grad()
    def _fill_in_absent(self) -> None:
        """Give the parameters of other stages gradients without elements, and run the hooks that see them."""
        for parameter in self.absent:
            if not parameter.requires_grad:
                continue
            with torch._C.DisableTorchFunctionSubclass():
                if parameter.grad is None:
                    parameter.grad = self.shards.place(parameter, torch.zeros_like(local_tensor(parameter)))
            full_shards.run_hooks(parameter)

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        self._in_window = True
        try:
            with nullcontext() if self.plan.pipeline.runs_backward_early else super()._hold_gradients():
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
        tied = self._tied if self.link.has_last else []
        elsewhere = {id(each) for each in tied} | {id(each.grad) for each in tied}
        counted = [gradient for gradient in gradients if id(gradient) not in elsewhere]
        own = total_norm(counted, norm_type) if counted else None
        return self.link.combined_norm(torch.zeros((), device=self.engine.device) if own is None else own, norm_type)


class _StageRoot(nn.Module):
    """What FSDP2 takes for the model, so that one forward of it, and one backward, is that of all microbatches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], tuple[torch.Tensor | None, torch.Tensor | None]]) -> Any:
        return run()


def _groups_of_stages(engine: NativeEngine) -> list[list[int]]:
    """Return the processes of each stage."""
    return engine.mesh.groups(*(role for role in Role if role is not Role.PIPELINE))


def _check_accumulates() -> None:
    """Refuse a backward that is not `loss.backward()`.

    Raises:
        EngineError: It is not.
    """
    if not accumulates():
        raise EngineError(
            "torch.autograd.grad() through a model in stages (config.dist.pp.size): a parameter's gradient is computed "
            "by one of them, and all have to take part. Call loss.backward(), and read parameter.grad"
        )


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
_NO_LOGITS_IN_CHUNKS = (
    "compute.chunked_loss: the logits of a forward with labels were never there as a whole: call the model without "
    "labels, under torch.no_grad()"
)
_NO_CACHE = MissingOutput(
    "past_key_values",
    "the past_key_values of a model in stages (config.dist.pp.size) were not kept: each stage has those of its own "
    "layers. To generate, load a checkpoint with dist.pp.size = 1",
)
