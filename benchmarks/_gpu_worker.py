"""One process of one case of `gpu.py`, on a GPU, or on the CPU to see that it works."""

import os
import time
from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from _gpu_cases import Case
from _memory_cases import Workload
from _models import MAKERS
from _training import Batch, Steps, make_optimizer, train, train_sharded
from _worker import serve
from torch import nn

MATRIX_SECS = 1.0


def run(case: Case, size: Workload, device: str, devices: int, total_steps: int) -> None:
    """Set a case up, and take its steps as `_worker.serve()` is told.

    Its facts are `peak_bytes` of the device since they were asked for last, None where they cannot be had.
    """
    serve(lambda: build(case, size, device, devices, total_steps), lambda: {"peak_bytes": peak_bytes(case)})
    if torch.distributed.is_initialized() and case.kind == "fsdp2":
        torch.distributed.destroy_process_group()


def build(case: Case, size: Workload, device: str, devices: int, total_steps: int) -> Steps:
    """Build a case's model and shard it, and return what trains it.

    Args:
        case: What to run.
        size: The model, and the batch of one device.
        device: `cuda`, `cpu` and so on.
        devices: Of all processes.
        total_steps: Steps for which there are samples.
    """
    tokens = make_tokens(size, total_steps * devices)
    model = MAKERS[size.family](size.layers, size.width, size.heads, size.vocabulary, size.length)
    if case.compiled:
        for block in blocks_of(model):
            block.compile()
    if case.kind == "fsdp2":
        return _by_hand(model, tokens, size.batch, device)
    return train_sharded(model, tokens, size.batch, make_config(case, devices))


def make_tokens(size: Workload, batches: int) -> torch.Tensor:
    """Return samples (batches * size.batch, size.length), small tokens more frequent."""
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(batches * size.batch, size.length, generator=generator) ** 4 * size.vocabulary).long()


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks that are sharded, and compiled, each by itself."""
    inner = model.base_model
    return list(inner.h if hasattr(inner, "h") else inner.layers)


def make_config(case: Case, devices: int) -> Any:
    """Return a case's config of torchacc, in bfloat16."""
    import torchacc

    config = torchacc.Config()
    config.backend = case.kind
    config.compute.bf16 = True
    config.dist.fsdp.size = devices
    for path, value in case.config.items():
        *sections, name = path.split(".")
        setattr(reduce(getattr, sections, config), name, value)
    return config


def _by_hand(model: Any, tokens: torch.Tensor, batch_size: int, device: str) -> Steps:
    """FSDP2 as its tutorial has it: each block and the root, computing in bfloat16, with float32 sums and weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # noqa: TID251
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    if processes == 1:
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (processes,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model.to(device)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def batches() -> Iterator[Batch]:
        for whole in torch.split(tokens, batch_size * processes):
            part = whole.chunk(processes)[rank].to(device, non_blocking=True)
            yield {"input_ids": part, "labels": part}

    return train(model, make_optimizer(model), batches())


def peak_bytes(case: Case) -> int | None:
    """Return the most bytes of this process's device since the last call, and start to count anew."""
    if case.kind == "xla":
        from torchacc.engines import registry

        engine = registry.active_engine()
        memory = engine.memory() if engine is not None else None
        return memory.peak_bytes if memory is not None and memory.of == "device" else None
    if not torch.accelerator.is_available():
        return None
    peak = int(torch.accelerator.max_memory_allocated())
    torch.accelerator.reset_peak_memory_stats()
    return peak


def matrix_peak(device: str, sizes: tuple[int, ...]) -> float:
    """Return the operations in a second of a product of bfloat16 matrices, the best of some sizes."""
    return max(_operations_in_a_second(device, size) for size in sizes)


def _operations_in_a_second(device: str, size: int) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    left @ right
    _wait(device)
    products, started = 0, time.perf_counter()
    while time.perf_counter() - started < MATRIX_SECS:
        for _ in range(10):
            left @ right
        _wait(device)
        products += 10
    return products * 2 * size**3 / (time.perf_counter() - started)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def flops_per_token(size: Workload) -> float:
    """Return the operations of a training step for each token, as torchacc's trainer counts them."""
    import torchacc
    from torchacc.train.flops import flops_per_token as count

    with torch.device("meta"):
        model = MAKERS[size.family](size.layers, size.width, size.heads, size.vocabulary, size.length)
    return float(count(torchacc.accelerate(model, None, torchacc.Config(backend="native")), size.length) or 0.0)


def describe(device: str, sizes: dict[str, Workload], matrix_sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return what the parent has to know: the device's name and peak, and what the models take."""
    name = "CPU" if device == "cpu" else torch.get_device_module(device).get_device_name(0)
    flops = {label: flops_per_token(size) for label, size in sizes.items()}
    return {"device": name, "matrix_flops": matrix_peak(device, matrix_sizes), "flops_per_token": flops}


def find_device() -> str | None:
    """Return the kind of this machine's accelerators; None where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else None


def count_devices() -> int:
    """Return the number of this machine's accelerators."""
    return torch.accelerator.device_count()
