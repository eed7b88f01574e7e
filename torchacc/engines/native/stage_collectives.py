"""What the stages of a pipeline send one another: hidden states forward, their gradients backward, the loss to all.

Autograd carries the gradients. The nodes that receive and send are part of the graph of each microbatch, so that its
backward in one stage is also what the stages beside wait for.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from torchacc.errors import EngineError
from torchacc.parallel.pipeline_plan import PipelinePlan

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NEXT, _PREVIOUS = 1, -1
_TAGS_PER_BATCH = 1 << 17
"""Tags of what is sent for one batch: of each stage two for each microbatch, and one for the dtype."""
_NUM_BATCHES = 1 << 13
"""After how many batches tags come again."""
_HEADER = 8
"""Numbers that describe a tensor: its dtype, its dimensions and their sizes."""

_batches = count()
"""Numbers the batches of all models, which share their process groups."""


class StageLink:
    """The connections of the stages of one device.

    Args:
        plan: Which device has which stages.
        groups: Groups of the processes of all stages, in their order: one, or as many as `num_groups()` says.
        place: This one's place among the devices.
        device: Where tensors lie.
    """

    def __init__(
        self, plan: PipelinePlan, groups: Sequence[dist.ProcessGroup], place: int, device: torch.device
    ) -> None:
        self.place = place
        self.num_devices = plan.num_devices
        self.num_stages = plan.size
        self._groups = groups
        self._group = groups[0]
        self._device = device
        self._sent: dict[tuple[int, int], deque[tuple[Any, torch.Tensor]]] = defaultdict(deque)
        """By stage and direction what may not have been received yet."""
        self._batch = next(_batches)
        self._left: list[tuple[Any, torch.Tensor]] = []
        """What nobody has received, as a forward was interrupted: its memory has to stay."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Lets received tensors have a gradient, and sent ones a backward."""

    @property
    def has_first(self) -> bool:
        """Whether this device has the stage that the batch begins with."""
        return self.place == 0

    @property
    def has_last(self) -> bool:
        """Whether this device has the stage that computes the loss."""
        return self.place == self.num_devices - 1

    def begin_batch(self) -> None:
        """Begin a batch, whose tags are others than those of a batch that was interrupted. Collective: all stages."""
        self._batch = next(_batches)
        for sent in self._sent.values():
            self._left += sent
            sent.clear()

    def _tag(self, stage: int, number: int = -1) -> int:
        """Return the tag of what goes from a stage to the next one of a microbatch, or of the dtype of all."""
        of_stage = _TAGS_PER_BATCH // self.num_stages * stage
        return self._batch % _NUM_BATCHES * _TAGS_PER_BATCH + of_stage + 2 * (number + 1)

    def send(self, hidden: torch.Tensor, stage: int, number: int) -> torch.Tensor:
        """Send hidden states to the next stage. In backward their gradient is received.

        Args:
            hidden: The hidden states.
            stage: The stage that has computed them.
            number: Which microbatch they are of.

        Returns:
            Zero, without dimensions, for the sum that backward begins with.
        """
        token: torch.Tensor = _Send.apply(hidden, self.anchor, self, stage, number)
        return token

    def receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int, number: int) -> torch.Tensor:
        """Return the hidden states that come to a stage. In backward their gradient is sent."""
        hidden: torch.Tensor = _Receive.apply(self.anchor, self, tuple(shape), dtype, stage, number)
        return hidden

    def send_dtype(self, dtype: torch.dtype, stage: int) -> None:
        """Say in which dtype a stage's hidden states come."""
        self._begin_send(torch.tensor(_DTYPES.index(dtype), device=self._device), stage, _NEXT, self._tag(stage))

    def receive_dtype(self, stage: int) -> torch.dtype:
        """Return in which dtype hidden states come to a stage."""
        return _DTYPES[int(self._receive((), torch.int64, stage, _PREVIOUS, self._tag(stage - 1)))]

    def scalar_from_last(self, own: torch.Tensor) -> torch.Tensor:
        """Return the last stage's number on all stages. Collective: all stages."""
        value = own.detach().to(self._device, torch.float32).clone()
        dist.broadcast(value, dist.get_global_rank(self._group, self.num_devices - 1), group=self._group)
        return value

    def from_last(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor of the last stage, which alone has it, on all stages. Collective: all stages."""
        source = dist.get_global_rank(self._group, self.num_devices - 1)
        header = torch.zeros(_HEADER, dtype=torch.int64)
        if tensor is not None:
            described = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
            header[: len(described)] = torch.tensor(described)
        header = header.to(self._device)
        dist.broadcast(header, source, group=self._group)
        kind, dims, *sizes = header.tolist()
        if tensor is None:
            tensor = torch.empty(sizes[:dims], dtype=_DTYPES[kind], device=self._device)
        full = tensor.detach().contiguous()
        dist.broadcast(full, source, group=self._group)
        return full

    def compare(self, own: str) -> bool:
        """Return whether all stages pass the same text. Collective: all stages."""
        found: list[Any] = [None] * self.num_devices
        dist.all_gather_object(found, own, group=self._group)
        return len(set(found)) == 1

    def combined_norm(self, own: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the norm of the tensors of all stages from those of each. Collective: all stages."""
        own = own.to(self._device)
        found = own.new_empty(self.num_devices)
        dist.all_gather_into_tensor(found, own.view(1), group=self._group)
        norm: torch.Tensor = torch.linalg.vector_norm(found, norm_type)
        return norm

    def total(self, own: torch.Tensor, *, is_held: bool) -> torch.Tensor:
        """Return the sum that the stages which hold a parameter have of it. Collective: all stages.

        Args:
            own: This stage's, without dimensions; in backward it has the gradient of the result.
            is_held: Whether it holds the parameter, as two stages hold a tied one.
        """
        found: torch.Tensor = _Total.apply(own, self, is_held)
        return found

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()

    def _begin_send(self, tensor: torch.Tensor, stage: int, to: int, tag: int) -> None:
        tensor, sent = tensor.detach().contiguous(), self._sent[stage, to]
        group, rank = self._connection(stage, to, to)
        sent.append((dist.isend(tensor, rank, group=group, tag=tag), tensor))
        if len(sent) > self.num_devices:  # in each schedule all before them have been received by then
            sent.popleft()[0].wait()

    def _receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int, source: int, tag: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        group, rank = self._connection(stage, source, -source)
        dist.recv(tensor, rank, group=group, tag=tag)
        return tensor

    def _connection(self, stage: int, beside: int, towards: int) -> tuple[dist.ProcessGroup, int]:
        """Return the group in which a stage exchanges with one beside it what goes towards either, and its process."""
        left = min(stage, stage + beside)
        kind = 2 * (left // (self.num_devices - 1)) + (towards == _PREVIOUS)
        rank = dist.get_global_rank(self._group, (stage + beside) % self.num_devices)
        return self._groups[kind % len(self._groups)], rank


def num_groups(plan: PipelinePlan, device: torch.device) -> int:
    """Return how many groups of processes stages need.

    On a GPU all that two processes send one another in one group runs in one order, so that a hidden state and a
    gradient that meet, or hidden states of two pairs of stages, would wait for one another.
    """
    return 1 if device.type == "cpu" else 2 * -(-(plan.size - 1) // (plan.num_devices - 1))


def refuse_graphs_of_gradients() -> None:
    """Refuse `create_graph=True` on each stage, before it waits for another."""
    if torch.is_grad_enabled():
        raise EngineError(
            "backward(create_graph=True) of a model in stages (config.dist.pp.size): gradients come from other "
            "processes without a graph. Leave it out, or set config.dist.pp.size = 1"
        )


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor, link: StageLink, stage: int, number: int
    ) -> torch.Tensor:
        ctx.how = link, stage, link._tag(stage, number), hidden.shape, hidden.dtype
        link._begin_send(hidden, stage, _NEXT, link._tag(stage, number))
        return torch.zeros((), device=hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        refuse_graphs_of_gradients()
        link, stage, tag, shape, dtype = ctx.how
        return link._receive(shape, dtype, stage, _NEXT, tag + 1), None, None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        link: StageLink,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        stage: int,
        number: int,
    ) -> torch.Tensor:
        ctx.how = link, stage, link._tag(stage - 1, number)
        return link._receive(shape, dtype, stage, _PREVIOUS, link._tag(stage - 1, number))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None, None, None]:
        refuse_graphs_of_gradients()
        link, stage, tag = ctx.how
        link._begin_send(gradient, stage, _PREVIOUS, tag + 1)
        return None, None, None, None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, link: StageLink, is_held: bool) -> torch.Tensor:
        found = torch.tensor([float(own) if is_held else 0.0, is_held], device=link._device)
        dist.all_reduce(found, group=link._group)
        return (found[0] / found[1].clamp(min=1)).to(own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None
