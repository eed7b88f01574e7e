"""How a batch runs through a device's stages in microbatches: all forwards first, or each backward as soon as it can.

In GPipe's schedule the script's `loss.backward()` runs the backward of all microbatches. In 1F1B ("one forward, one
backward"), interleaved or not, the model's forward runs both, so that a stage holds the activations of a few
microbatches only; without a bubble it computes the gradients of weights while it would wait. Gradients then wait beside
those of the parameters until the script's backward says by what to scale them.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import checkpoint

from torchacc.engines.native.gradients import is_graph_kept
from torchacc.engines.native.stage_collectives import refuse_graphs_of_gradients
from torchacc.engines.native.stage_inputs import OF_LOSS, SPLIT_INPUTS
from torchacc.errors import EngineError
from torchacc.parallel.pipeline_plan import Pass

if TYPE_CHECKING:
    from torchacc.engines.native.pipelined_model import PipelinedModel


class Microbatches:
    """One device's forwards of the microbatches of a batch.

    Args:
        owner: The model.
        inner: Its own forward.
        given: The inputs of the batch by name.
    """

    def __init__(self, owner: "PipelinedModel", inner: Callable[..., Any], given: Mapping[str, Any]) -> None:
        self.owner = owner
        self.link = owner.link
        self._inner = inner
        self._parts = list(self._split(given))
        self._dtypes: dict[int, torch.dtype] = {}
        """In which hidden states come to each stage."""
        self.has_labels = "labels" in given
        is_in_chunks = self.has_labels and bool(owner.engine.config.compute.chunked_loss)
        self.returns_logits = not (torch.is_grad_enabled() or is_in_chunks)
        """Whether the last stage has logits that stay."""
        self.output_type: type | None = None
        """Of what the model's forward returns."""
        self.output_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._parts)

    def _split(self, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        rows = len(given["input_ids"])
        count = min(rows, self.owner.plan.pipeline.num_microbatches)
        parts: dict[str, Any] = {}
        for name, value in given.items():
            is_split = name in SPLIT_INPUTS and value.dim() > 1 and len(value) == rows
            parts[name] = value.tensor_split(count) if is_split else [value] * count
        for number in range(count):
            yield {name: parts[name][number] for name in parts if name != "num_items_in_batch"}

    def run(self, stage: int, number: int) -> tuple[Any, torch.Tensor | None]:
        """Run one microbatch through one of this device's stages.

        Returns:
            The last stage's loss, where there are labels, or what stands in the graph for what is sent; the last
            stage's logits, where they stay.
        """
        link, modules, microbatch = self.link, self.owner.modules, self._parts[number]
        is_last = stage == link.num_stages - 1
        if stage > 0:
            modules.receive = partial(self._receive, stage, number)
        if not is_last:
            microbatch = {name: value for name, value in microbatch.items() if name not in OF_LOSS}
        with modules.computing(stage):
            output = self._inner(**microbatch, return_dict=True)
        self.output_type, self.output_names = type(output), tuple(output)
        hidden, modules.receive, modules.computed = modules.computed, None, None
        if is_last:
            return output.get("loss"), output.logits if self.returns_logits else None
        assert hidden is not None, "a layer of the next stage has been called"
        if number == 0:
            link.send_dtype(hidden.dtype, stage)
        return link.send(hidden, stage, number), None

    def _receive(self, stage: int, number: int, shape: torch.Size) -> torch.Tensor:
        if number == 0:
            self._dtypes[stage] = self.link.receive_dtype(stage)
        return self.link.receive(shape, self._dtypes[stage], stage, number)


def run_forwards(microbatches: Microbatches) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run all forwards of a batch; return its loss, where there are labels, and its logits, where they stay."""
    owner, link = microbatches.owner, microbatches.link
    actions = owner.plan.pipeline.forwards(link.place, len(microbatches))
    with owner.keeping_weights(until_backward=True, ahead=not link.has_first):
        outputs = [owner.run_root(partial(microbatches.run, stage, number)) for _, stage, number in actions]
    loss = None
    if microbatches.has_labels:
        losses = [loss for loss, _ in outputs]
        total: Any = sum(each.detach() for each in losses)  # zero, of what is sent
        loss = _WithBackwards.apply(link.scalar_from_last(total), link.anchor, owner, losses)
    logits = None
    if microbatches.returns_logits:
        own: Any = [each for _, each in outputs if each is not None]
        logits = link.from_last(torch.cat(own) if link.has_last else None)
    link.finish()
    return loss, logits


class _WithBackwards(torch.autograd.Function):
    """Give a loss the backwards of this stage's microbatches.

    Each microbatch has a graph and a backward of its own, so that gradients are summed in the dtype of their reduction.
    """

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, anchor: torch.Tensor, owner: "PipelinedModel", losses: list[torch.Tensor]
    ) -> torch.Tensor:
        ctx.how = owner, losses
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        refuse_graphs_of_gradients()
        _ = ctx.saved_tensors  # raises on all stages where the graph is gone
        owner, losses = ctx.how
        owner.run_backwards(losses, gradient)
        return (None,) * 4


def run_forwards_and_backwards(microbatches: Microbatches) -> torch.Tensor:
    """Run all forwards and backwards of a batch in turn; return its loss, whose backward adds the gradients."""
    owner, link, device = microbatches.owner, microbatches.link, microbatches.owner.engine.device
    if torch._C._current_graph_task_id() != -1:
        raise EngineError(_computed_again(owner))
    losses: dict[tuple[int, int], torch.Tensor] = {}
    total = torch.zeros((), device=device)
    actions = owner.plan.pipeline.actions(link.place, len(microbatches))

    kept = owner.keeping_weights(until_backward=False, ahead=not link.has_first)
    with owner.computing_gradients() as computed, kept:
        for action in actions:
            kind, stage, number = action
            is_last = action is actions[-1]
            if kind is Pass.FORWARD:
                loss, _ = owner.run_root(partial(microbatches.run, stage, number))
                losses[stage, number] = loss
                total += loss.detach()
                continue
            with torch.autocast(device.type, enabled=False):  # as in a script's own backward
                if kind is Pass.WEIGHTS:
                    owner.compute_weight_gradients(number, is_last=is_last)
                    continue
                with owner.splitting_backward(number):
                    owner.run_backward(losses.pop((stage, number)), is_last=is_last)
    link.finish()
    value = link.scalar_from_last(total)
    scaled: torch.Tensor = _WithGradients.apply(value, link.anchor, owner, computed)
    return scaled


def check_backward(owner: "PipelinedModel") -> None:
    """Refuse what would see gradients before they are complete, or have one stage compute a forward again.

    Raises:
        EngineError: There is such a thing.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks and hooks[0].__module__ == checkpoint.__name__:
        raise EngineError(_computed_again(owner))
    check_hooks(owner)


def check_hooks(owner: "PipelinedModel") -> None:
    """Refuse hooks that would see gradients before they are complete.

    Raises:
        EngineError: There is one.
    """
    pipeline = owner.plan.pipeline
    is_early = pipeline.runs_backward_early
    seen = owner.model.parameters() if is_early else owner.shared
    with torch._C.DisableTorchFunctionSubclass():  # each attribute of a distributed tensor would be a call in Python
        has_hooks = any(getattr(each, "_post_accumulate_grad_hooks", None) for each in seen)
    if has_hooks:
        why = (
            f"with config.dist.pp.schedule = {pipeline.schedule!r}: it would run in the model's forward, before the "
            "loss is scaled"
            if is_early
            else "of a parameter that the first and the last stage share (config.dist.pp.size): it would run before "
            "their gradients are summed"
        )
        raise EngineError(f"register_post_accumulate_grad_hook() {why}. Do after loss.backward() what it does")


def _computed_again(owner: "PipelinedModel") -> str:
    return (
        f"{type(owner.model).__name__} in torch.utils.checkpoint, where it is in stages (config.dist.pp.size): one of "
        "them would compute its forward again while the others wait. Set config.memory.gc = True, which computes each "
        "layer again"
    )


class _WithGradients(torch.autograd.Function):
    """Give a loss the gradients that its forward has computed, for a backward that scales and adds them."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        anchor: torch.Tensor,
        owner: "PipelinedModel",
        computed: Mapping[nn.Parameter, torch.Tensor],
    ) -> torch.Tensor:
        ctx.how = owner, computed, owner.weight_versions()
        ctx.save_for_backward(value)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        refuse_graphs_of_gradients()
        _ = ctx.saved_tensors  # raises on all stages where the graph is gone
        owner, computed, versions = ctx.how
        is_last = not is_graph_kept()
        if is_last:
            ctx.how = None  # frees them, or leaves them to the parameters
        owner.add_gradients(computed, gradient, versions, may_keep=is_last)
        return (None,) * 4
