"""Cross entropy of a head's logits from hidden states, a chunk of tokens at a time, and its gradients with it.

The gradients are computed in forward, chunk by chunk, while a chunk's logits are there, as Liger's fused linear cross
entropy does (Hsu et al., 2024): nothing is computed twice, and what is kept for backward is as large as the hidden
states and the head. A weight's gradients are summed over the chunks in float32, and reach the weight once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from torchacc.errors import ConfigError

LOGITS_OF_A_CHUNK = 2**26
"""How many logits a chunk has, at most: 256 MiB in float32."""


@dataclass(frozen=True)
class LossChunks:
    """How the loss of tokens is computed in chunks."""

    logits_of: Callable[[torch.Tensor], torch.Tensor]
    """Computes the logits of a chunk from its hidden states of shape (tokens, hidden size)."""
    size: int
    """Tokens of a chunk, on each device."""
    ignore_index: int
    label_smoothing: float
    is_mean: bool
    """Whether the loss is the mean over the labels that count, and not their sum."""
    num_devices: int = 1
    """Devices that one program's tokens are split over, in order."""
    after: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor] = lambda tokens, sums: tokens
    """Returns a tensor that waits for others, where a program is recorded before it runs."""

    stand_ins: Sequence[torch.Tensor] = ()
    """What `logits_of` computes with in the place of each weight: without its hooks, and without what it is made of."""

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the loss, a float32 tensor without dimensions.

        Args:
            hidden: What the head is given, of shape (tokens, hidden size).
            labels: Of shape (tokens,).
            weights: All tensors, beside the hidden states, that may get gradients by `logits_of`.
        """
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *weights)):
            loss: torch.Tensor = _LossAndGradients.apply(self, labels, hidden, *weights)
            return loss
        return self.compute(hidden, labels, ())[0]

    def compute(
        self, hidden: torch.Tensor, labels: torch.Tensor, wanted: Sequence[torch.Tensor], *, of_hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
        """Return the loss, its gradient for the hidden states, and those for tensors that `logits_of` uses.

        Args:
            hidden: Hidden states.
            labels: Labels.
            wanted: The tensors whose gradients are computed.
            of_hidden: Whether that of the hidden states is.
        """
        count = (labels != self.ignore_index).sum() if self.is_mean else None
        scale = None if count is None else 1.0 / count.clamp(min=1).to(_accurate(hidden.dtype))
        total: torch.Tensor | None = None
        of_tokens: list[torch.Tensor] = []
        sums: list[torch.Tensor | None] = [None] * len(wanted)
        for tokens, answers in self._chunks(hidden, labels):
            if total is not None:
                tokens = self.after(tokens, [total, *(each for each in sums if each is not None)])
            loss, gradients = self._one(tokens, answers, wanted, scale, of_hidden)
            total = loss if total is None else total + loss
            if of_hidden:
                of_tokens.append(gradients.pop(0))  # type: ignore[arg-type]
            for place, gradient in enumerate(gradients):
                if gradient is not None:
                    sums[place] = _added(sums[place], gradient)
        assert total is not None
        of_states = torch.cat(of_tokens, dim=1).reshape(hidden.shape) if of_hidden else None
        return total if count is None else total / count, of_states, sums

    def _one(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        wanted: Sequence[torch.Tensor],
        scale: torch.Tensor | None,
        of_hidden: bool,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return the summed loss of a chunk, and its gradients, multiplied by `scale`."""
        tokens = tokens.detach().requires_grad_(of_hidden)
        with_gradients = of_hidden or len(wanted) > 0
        # The hooks of the forward around this one, which note or move what it saves for its backward, are not for what
        # is used up right here.
        with torch.set_grad_enabled(with_gradients), saved_tensors_hooks(_as_it_is, _as_it_is):
            loss = self._summed_loss(self.logits_of(tokens.reshape(-1, tokens.shape[-1])), labels.reshape(-1))
            if not with_gradients:
                return loss, []
            asked = [*([tokens] if of_hidden else []), *wanted]
            _refuse_others(loss, asked)
            return loss.detach(), list(torch.autograd.grad(loss, asked, scale, allow_unused=True))

    def _summed_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tokens' losses, in float32 at least."""
        if logits.device.type != "xla" and 0 <= self.label_smoothing <= 1:
            loss: torch.Tensor = _InPlaceCrossEntropy.apply(logits, labels, self.ignore_index, self.label_smoothing)
            return loss
        return F.cross_entropy(  # XLA fuses its backward, and it refuses other numbers for smoothing
            logits.to(_accurate(logits.dtype)),
            labels,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )

    def _chunks(self, hidden: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield hidden states and labels of each chunk, as many tokens of each device's, as alike in size as can be."""
        devices = self.num_devices if len(labels) % self.num_devices == 0 else 1
        hidden, labels = hidden.reshape(devices, -1, hidden.shape[-1]), labels.reshape(devices, -1)
        length = labels.shape[1]
        size = max(ceil(length / max(ceil(length / self.size), 1)), 1)
        for start in range(0, max(length, 1), size):
            yield hidden[:, start : start + size], labels[:, start : start + size]


class _InPlaceCrossEntropy(torch.autograd.Function):
    """The sum of cross entropies, as `F.cross_entropy()` has it, that holds one tensor of the logits' shape.

    Its gradient is written over the logarithms of probabilities, as Liger's kernels do: backward can run once.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, ignore_index: int, label_smoothing: float
    ) -> torch.Tensor:
        logs = F.log_softmax(logits, dim=-1, dtype=_accurate(logits.dtype))
        counts = labels != ignore_index
        loss = F.nll_loss(logs, labels, ignore_index=ignore_index, reduction="sum")
        if label_smoothing:
            others = -logs.mean(dim=1).where(counts, 0).sum()
            loss = (1 - label_smoothing) * loss + label_smoothing * others
        ctx.save_for_backward(logs, labels.where(counts, 0).long().unsqueeze(1), counts)
        ctx.label_smoothing, ctx.dtype = label_smoothing, logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logs, classes, counts = ctx.saved_tensors
        gradient = logs.exp_()
        if ctx.label_smoothing:
            gradient -= ctx.label_smoothing / logs.shape[1]
        gradient.scatter_add_(1, classes, torch.full_like(classes, ctx.label_smoothing - 1, dtype=gradient.dtype))
        gradient *= (counts * grad).unsqueeze(1)
        return gradient.to(ctx.dtype), None, None, None


def _accurate(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or a dtype with more digits."""
    return torch.promote_types(dtype, torch.float32)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _refuse_others(loss: torch.Tensor, asked: Sequence[torch.Tensor]) -> None:
    """Raise if a tensor would get a gradient that is not asked for, and so would be lost."""
    known, seen, nodes = {id(tensor) for tensor in asked}, set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise ConfigError(
                f"compute.chunked_loss: the head computes logits with a tensor of shape {tuple(variable.shape)} that "
                "is trained and is not a parameter of the head or of its modules: set config.compute.chunked_loss = "
                "False"
            )
        nodes += [following for following, _ in node.next_functions]


def _added(total: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """Add a chunk's gradient to the sum, which has float32's digits at least."""
    if total is None:
        return gradient.to(_accurate(gradient.dtype), copy=True)
    return total.add_(gradient)


class _LossAndGradients(torch.autograd.Function):
    """The loss; its gradients are computed with it."""

    @staticmethod
    def forward(
        ctx: Any, chunks: LossChunks, labels: torch.Tensor, hidden: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        of_hidden, *of_weights = ctx.needs_input_grad[2:]
        used = chunks.stand_ins or weights
        wanted = [weight for weight, is_wanted in zip(used, of_weights, strict=True) if is_wanted]
        loss, of_states, sums = chunks.compute(hidden, labels, wanted, of_hidden=of_hidden)
        found = iter(sums)
        ctx.save_for_backward(of_states, *(next(found) if is_wanted else None for is_wanted in of_weights))
        ctx._saved_reduction = 1 if chunks.is_mean else 2  # as PyTorch's losses note it, for who asks for sums
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *weights)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [
            None if gradient is None else (gradient * grad).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, None, *gradients
