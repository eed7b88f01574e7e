"""Recompute by PyTorch's non-reentrant checkpoint: of all that a module computes, or of all but its matmuls."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torchacc.engines import recompute
from torchacc.engines.native.compiled_units import CompiledUnits
from torchacc.errors import EngineError
from torchacc.parallel.plan import ShardingPlan
from torchacc.parallel.saved_matmuls import SavedMatmuls

Forward = Callable[..., Any]


def install_recompute(model: nn.Module, plan: ShardingPlan, compiled: CompiledUnits | None) -> None:
    """Recompute the modules that a plan names in backward, by its policy.

    Args:
        model: The model, which is changed in place.
        plan: Its plan.
        compiled: What is compiled of it; None where nothing is.
    """
    checkpoint_of_policy = checkpointed_except_matmuls if plan.saves_matmuls else checkpointed
    recompute.install(model, plan.recomputed, checkpoint_of_policy)
    if compiled is not None:
        for name in plan.recomputed:
            if not recompute.has_buffers(model.get_submodule(name)):
                compiled.recompute_inside(name)


def checkpointed(module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a module's forward, and have it recomputed in backward, where its norms count no batch a second time."""
    has_run = False

    def run(*args: Any) -> Any:
        nonlocal has_run
        again, has_run = has_run, True
        with recompute.statistics_kept(module) if again else nullcontext():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False)


def checkpointed_except_matmuls(
    module: nn.Module, forward: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a module's forward, and have all of it but its matmuls recomputed in backward.

    Raises:
        EngineError: In backward: the module writes over what is kept, or computes other matmuls the second time.
    """
    matmuls = SavedMatmuls(type(module).__name__)
    runs = 0

    def run(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 1:
            return forward(*args, **kwargs)
        if runs > 2:
            raise EngineError(
                "a second backward through the same graph (retain_graph=True, or torch.autograd.grad() before it) "
                "finds nothing left of what memory.gc_policy = 'save_matmuls' keeps for one: leave "
                "config.memory.gc_policy at 'full', which computes everything again each time"
            )
        try:
            with recompute.statistics_kept(module):
                output = forward(*args, **kwargs)
        except RuntimeError as error:
            explained = matmuls.explain(error)
            if explained is None:
                raise
            raise explained from error
        matmuls.check_all_used()
        return output

    with set_checkpoint_early_stop(False):  # else the last matmuls would not be looked at
        return checkpoint(run, *args, use_reentrant=False, context_fn=matmuls.contexts)
