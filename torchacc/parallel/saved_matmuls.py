"""What is kept of a module that is recomputed in backward: what costs the most time to compute.

Kept are the results of matmuls, convolutions and fused attention. Batched matmuls (`bmm`) are not: they are
mostly the scores of attention, which grow with the square of a sample's length, and are why one recomputes.
"""

from contextlib import ExitStack
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from typing_extensions import Self

from torchacc.errors import EngineError

_KEPT = {
    "aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::convolution",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
}  # fmt: skip
"""Operations by their names, as not each of them is there in each version of PyTorch."""
_CHANGED = "has been mutated"
"""What PyTorch says of a kept result that the module has written over."""
_DIFFERS = "nondeterministic or depend on global state"
"""What PyTorch says, from 2.13 on, of any operation that forward did not have, also of those that gather a unit."""


class SavedMatmuls:
    """The policy of one forward of a module: called with each operation, in forward and again in backward.

    PyTorch hands out what is kept in the order in which it was kept, so that a forward which does not compute the same
    matmuls again would take wrong ones for them. It is refused.
    """

    def __init__(self, name: str) -> None:
        """Begin a forward of a module, which messages call by this name."""
        self._name = name
        self._kept: list[tuple[Any, ...]] = []
        self._num_used = 0

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Say what is to become of an operation's results."""
        if not _is_kept(op, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            self._kept.append(_described(op, args, kwargs))
        return CheckpointPolicy.MUST_SAVE

    def use(self, op: Any, args: Any, kwargs: Any) -> None:
        """Take note of an operation that is recomputed.

        Raises:
            EngineError: Its result would be that of another one.
        """
        if not _is_kept(op, args, kwargs):
            return
        if self._num_used >= len(self._kept) or self._kept[self._num_used] != _described(op, args, kwargs):
            raise self._differs()
        self._num_used += 1

    def contexts(self) -> tuple[Any, Any]:
        """Return the context of the forward, and that in which it is recomputed: `context_fn` of a checkpoint."""
        forward, again = create_selective_checkpoint_contexts(self)
        return forward, _Watched(again, self)

    def check_all_used(self) -> None:
        """Check that all that was kept has been taken again.

        Raises:
            EngineError: It has not.
        """
        if self._num_used != len(self._kept):
            raise self._differs()

    def explain(self, error: RuntimeError) -> EngineError | None:
        """Return what to write where PyTorch has raised this while the module was recomputed; None for others."""
        if _DIFFERS in str(error):
            return self._differs()
        if _CHANGED not in str(error):
            return None
        return EngineError(
            f"{self._name} writes over the result of a matrix product in place (as x += y and nn.ReLU(inplace=True) "
            "do), which memory.gc_policy = 'save_matmuls' keeps for backward: write x = x + y, or leave "
            "config.memory.gc_policy at 'full'"
        )

    def _differs(self) -> EngineError:
        return EngineError(
            f"{self._name} does not compute the same matrix products when it is recomputed in backward (it keeps "
            "some from one call to the next, chooses by itself which it computes, or, from PyTorch 2.13 on, has units "
            "inside of it), so that memory.gc_policy = 'save_matmuls' would take others for them: leave "
            "config.memory.gc_policy at 'full'"
        )


class _Watched(ExitStack):
    """Lets a module be recomputed in PyTorch's context, and watches it: from 2.13 on it asks no policy then."""

    def __init__(self, again: Any, matmuls: SavedMatmuls) -> None:
        super().__init__()
        self._again, self._matmuls = again, matmuls

    def __enter__(self) -> Self:
        self.enter_context(self._again)
        self.enter_context(_Watch(self._matmuls))
        return self


class _Watch(TorchDispatchMode):
    """Tells of each operation that is recomputed."""

    def __init__(self, matmuls: SavedMatmuls) -> None:
        super().__init__()
        self._matmuls = matmuls

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._matmuls.use(op, args, kwargs)
        return op(*args, **kwargs)


def _is_kept(op: Any, args: Any, kwargs: Any) -> bool:
    return op.name() in _KEPT and not _draws_random_numbers(op, args, kwargs)


def _described(op: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    return (op, *(leaf.shape for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "shape")))


def _draws_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation drops values: kept, it would draw no random numbers again, as those after it do."""
    if "dropout_p" in kwargs:
        return bool(kwargs["dropout_p"])
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("dropout_p") if "dropout_p" in names else len(args)
    return place < len(args) and bool(args[place])
