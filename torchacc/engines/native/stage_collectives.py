"""What the stages of a pipeline send one another: hidden states forward, their gradients backward, the loss to all.

Autograd carries the gradients. The nodes that receive and send are part of the graph of each microbatch, so that its
backward in one stage is also what the stages beside wait for.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from torchacc.errors import EngineError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NEXT, _PREVIOUS = 1, -1
_ON_THE_WAY = 2
"""How many tensors to the same stage may wait to be received: 1F1B has received all others by then."""
_TAGS_PER_BATCH = 1 << 14
"""Tags of what is sent for one batch: two for each microbatch, and one for the dtype."""
_NUM_BATCHES = 1 << 16
"""After how many batches tags come again."""
_HEADER = 8
"""Numbers that describe a tensor: its dtype, its dimensions and their sizes."""

_batches = count()
"""Numbers the batches of all models, which share their process groups."""


class StageLink:
    """The connections of one stage.

    Args:
        group: The processes of all stages, in their order.
        stage: This one's.
        device: Where tensors lie.
        backward: The same processes, for gradients: on a GPU what is sent in one group runs in one order, in which a
            hidden state and a gradient that meet would wait for one another.
    """

    def __init__(
        self, group: dist.ProcessGroup, stage: int, device: torch.device, backward: dist.ProcessGroup | None = None
    ) -> None:
        self.stage = stage
        self.size = group.size()
        self._group = group
        self._device = device
        self._groups = {_NEXT: group, _PREVIOUS: backward or group}
        """The group in which hidden states go to the next stage, and that in which gradients go to the previous one."""
        self._sent: dict[int, deque[tuple[Any, torch.Tensor]]] = {_NEXT: deque(), _PREVIOUS: deque()}
        self._batch = next(_batches)
        self._left: list[tuple[Any, torch.Tensor]] = []
        """What nobody has received, as a forward was interrupted: its memory has to stay."""
        self.anchor = torch.zeros((), requires_grad=True)
        """Lets received tensors have a gradient, and sent ones a backward."""

    @property
    def is_first(self) -> bool:
        """Whether this stage begins with the model's inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.size - 1

    def begin_batch(self) -> None:
        """Begin a batch, whose tags are others than those of a batch that was interrupted. Collective: all stages."""
        self._batch = next(_batches)
        for sent in self._sent.values():
            self._left += sent
            sent.clear()

    @property
    def _first_tag(self) -> int:
        return self._batch % _NUM_BATCHES * _TAGS_PER_BATCH

    def send(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        """Send hidden states to the next stage. In backward their gradient is received.

        Args:
            hidden: The hidden states.
            number: Which microbatch they are of.

        Returns:
            Zero, without dimensions, for the sum that backward begins with.
        """
        token: torch.Tensor = _Send.apply(hidden, self.anchor, self, self._first_tag + 2 * number + 1)
        return token

    def receive(self, shape: Sequence[int], dtype: torch.dtype, number: int) -> torch.Tensor:
        """Return the hidden states that the previous stage sends. In backward their gradient is sent."""
        hidden: torch.Tensor = _Receive.apply(self.anchor, self, tuple(shape), dtype, self._first_tag + 2 * number + 1)
        return hidden

    def send_dtype(self, dtype: torch.dtype) -> None:
        """Say in which dtype hidden states come."""
        self._begin_send(torch.tensor(_DTYPES.index(dtype), device=self._device), _NEXT, self._first_tag)

    def receive_dtype(self) -> torch.dtype:
        """Return in which dtype hidden states come from the previous stage."""
        return _DTYPES[int(self._receive((), torch.int64, _PREVIOUS, self._first_tag))]

    def scalar_from_last(self, own: torch.Tensor) -> torch.Tensor:
        """Return the last stage's number on all stages. Collective: all stages."""
        value = own.detach().to(self._device, torch.float32).clone()
        dist.broadcast(value, dist.get_global_rank(self._group, self.size - 1), group=self._group)
        return value

    def from_last(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor of the last stage, which alone has it, on all stages. Collective: all stages."""
        source = dist.get_global_rank(self._group, self.size - 1)
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
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._group)
        return len(set(found)) == 1

    def combined_norm(self, own: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the norm of the tensors of all stages from those of each. Collective: all stages."""
        own = own.to(self._device)
        found = own.new_empty(self.size)
        dist.all_gather_into_tensor(found, own.view(1), group=self._group)
        norm: torch.Tensor = torch.linalg.vector_norm(found, norm_type)
        return norm

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()

    def _begin_send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        tensor = tensor.detach().contiguous()
        rank, sent = dist.get_global_rank(self._group, self.stage + to), self._sent[to]
        sent.append((dist.isend(tensor, rank, group=self._groups[to], tag=tag), tensor))
        if len(sent) > _ON_THE_WAY:
            sent.popleft()[0].wait()

    def _receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        rank = dist.get_global_rank(self._group, self.stage + source)
        dist.recv(tensor, rank, group=self._groups[-source], tag=tag)
        return tensor


def refuse_graphs_of_gradients() -> None:
    """Refuse `create_graph=True` on each stage, before it waits for another."""
    if torch.is_grad_enabled():
        raise EngineError(
            "backward(create_graph=True) of a model in stages (config.dist.pp.size): gradients come from other "
            "processes without a graph. Leave it out, or set config.dist.pp.size = 1"
        )


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor, link: StageLink, tag: int) -> torch.Tensor:
        ctx.how = link, tag, hidden.shape, hidden.dtype
        link._begin_send(hidden, _NEXT, tag)
        return torch.zeros((), device=hidden.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        refuse_graphs_of_gradients()
        link, tag, shape, dtype = ctx.how
        return link._receive(shape, dtype, _NEXT, tag + 1), None, None, None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, link: StageLink, shape: tuple[int, ...], dtype: torch.dtype, tag: int
    ) -> torch.Tensor:
        ctx.how = link, tag
        return link._receive(shape, dtype, _PREVIOUS, tag)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None, None]:
        refuse_graphs_of_gradients()
        link, tag = ctx.how
        link._begin_send(gradient, _PREVIOUS, tag + 1)
        return None, None, None, None, None
