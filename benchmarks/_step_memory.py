"""Read from a training step of PyTorch on a CPU what it needs in memory and what it sends, tensor by tensor."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = {
    "c10d._allgather_base_.default": "all-gather",
    "c10d._reduce_scatter_base_.default": "reduce-scatter",
    "c10d.allreduce_.default": "all-reduce",
}


def measure(step: Callable[[], object]) -> dict[str, Any]:
    """Take a training step, and return the bytes of this process; they depend on nothing else that the machine does.

    Args:
        step: Takes one training step like the one before it; it starts by freeing the gradients.

    Returns:
        `peak` bytes of all tensors that are alive at once; `rest`, those that are alive all the time: parameters,
        optimizer state and samples; and `traffic` by collective, `count` and `size`, the bytes of the results.
    """
    with _Traffic() as traffic, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    # What was allocated before the step and is alive after it was alive all the time.
    rest = _live_bytes() - alive
    return {"peak": rest + peak, "rest": rest, "traffic": traffic.found}


class _Traffic(TorchDispatchMode):
    """Counts the collectives that pass, and the bytes of their results on this process."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = COLLECTIVES.get(str(func))
        if kind is not None:
            results = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            entry = self.found.setdefault(kind, {"count": 0, "size": 0})
            entry["count"] += 1
            entry["size"] += sum(result.nbytes for result in results)
        return func(*args, **(kwargs or {}))


def _live_bytes() -> int:
    """Return the bytes of all tensors that Python knows, memory that several share counted once."""
    gc.collect()
    plain = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in plain if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
