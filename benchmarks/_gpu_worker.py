"""One process of one case of `gpu.py`, on a GPU, or on the CPU to see that it works."""

import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from _gpu_cases import CASES, FILLED, RECOMPUTED, TINY_MEMORY, Case
from _memory_cases import Workload
from _models import MAKERS
from _training import Batch, Steps, make_optimizer, train, train_sharded
from _worker import serve
from torch import nn

MATRIX_SECS = 1.0
FP8_CAPABILITY = (8, 9)
RECOMPUTED_CASE = next(case for case in CASES if case.name == RECOMPUTED)


def run(case: Case, size: Workload, device: str, devices: int, total_steps: int, *, quick: bool) -> None:
    """Set a case up, and take its steps as `_worker.serve()` is told.

    Its facts are `peak_bytes` of the device since they were asked for last, None where they cannot be had.
    """
    serve(
        lambda: build(case, size, device, devices, total_steps, quick=quick), lambda: {"peak_bytes": peak_bytes(case)}
    )
    if torch.distributed.is_initialized() and case.kind in BY_HAND:
        torch.distributed.destroy_process_group()


def build(case: Case, size: Workload, device: str, devices: int, total_steps: int, *, quick: bool) -> Steps:
    """Build a case's model and shard it, and return what trains it.

    Args:
        case: What to run.
        size: The model, and the batch of one device.
        device: `cuda`, `cpu` and so on.
        devices: Of all processes.
        total_steps: Steps for which there are samples.
        quick: Without the code that torch.compile writes, and with small layers in float8, too.
    """
    tokens = make_tokens(size, total_steps * devices)
    rank, _ = _rank_and_processes()
    is_on_host = device == "cpu" or case.kind == "xla"
    with torch.device("cpu") if is_on_host else torch.device(device, rank):  # where drawing weights takes no time
        model = make(size)
    if case.kind in BY_HAND:
        mesh = join_processes(device)
        model = BY_HAND[case.kind](case, model.to(device), mesh, quick)
        return train(model, _optimizer_by_hand(case, model), _parts(tokens, size.batch, device))
    return train_sharded(model, tokens, size.batch, make_config(case, devices, quick=quick))


def make(size: Workload) -> Any:
    """Return a model of a size."""
    return MAKERS[size.family](size.layers, size.width, size.heads, size.vocabulary, size.length)


def make_tokens(size: Workload, batches: int) -> torch.Tensor:
    """Return samples (batches * size.batch, size.length), small tokens more frequent."""
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(batches * size.batch, size.length, generator=generator) ** 4 * size.vocabulary).long()


def blocks_of(model: Any) -> list[nn.Module]:
    """Return the blocks that are sharded, and compiled, each by itself."""
    inner = model.base_model
    return list(inner.h if hasattr(inner, "h") else inner.layers)


def make_config(case: Case, devices: int, *, quick: bool = False) -> Any:
    """Return a case's config of torchacc, in bfloat16."""
    import torchacc

    config = torchacc.Config()
    config.backend = case.kind
    config.compute.bf16 = True
    config.compute.compile, config.compute.fp8 = case.compiled, case.fp8
    config.memory.gc = case.recomputed
    config.dist.fsdp.size = devices
    if quick and case.compiled:
        config.compute.compile_backend = "aot_eager"
    if quick and case.fp8:
        config.compute.fp8_min_features = 16
        config.compute.fp8_emulate = not torch.accelerator.is_available()
    for path, value in case.config.items():
        *sections, name = path.split(".")
        setattr(reduce(getattr, sections, config), name, value)
    return config


def join_processes(device: str) -> Any:
    """Start torch.distributed, and return the mesh of all processes."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, processes = _rank_and_processes()
    if device != "cpu":
        torch.accelerator.set_device_index(rank)
    if processes == 1:
        torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (processes,))


def _rank_and_processes() -> tuple[int, int]:
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # noqa: TID251


def _parts(tokens: torch.Tensor, batch_size: int, device: str) -> Iterator[Batch]:
    rank, processes = _rank_and_processes()
    for whole in torch.split(tokens, batch_size * processes):
        part = whole.chunk(processes)[rank].to(device, non_blocking=True)
        yield {"input_ids": part, "labels": part}


def _policy() -> Any:
    """Compute in bfloat16, with float32 sums and weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _fsdp2(case: Case, model: Any, mesh: Any, quick: bool) -> Any:
    """FSDP2 as its tutorial has it: each block and the root."""
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(model):
        if case.compiled:
            block.compile(backend=_compiler(quick))
        fully_shard(block, mesh=mesh, mp_policy=_policy())
    return fully_shard(model, mesh=mesh, mp_policy=_policy())


def _torchtitan(case: Case, model: Any, mesh: Any, quick: bool) -> Any:
    """Shard as torchtitan does a Llama: float8, then recompute, compile and FSDP2 of each block; the ends apart."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    if case.fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=mesh.device_type == "cpu")
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    blocks = getattr(model.base_model, "h", None) or model.base_model.layers
    for name, block in list(blocks.named_children()):
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        wrapped.compile(backend=_compiler(quick))
        blocks.register_module(name, fully_shard(wrapped, mesh=mesh, mp_policy=_policy()))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is not head.weight:
        fully_shard(embedding, mesh=mesh, mp_policy=_policy())
        # The last to run is the first that backward needs.
        fully_shard([model.base_model.norm, head], mesh=mesh, mp_policy=_policy(), reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, mp_policy=_policy())


BY_HAND = {"fsdp2": _fsdp2, "torchtitan": _torchtitan}
"""What shards a model, by the kind of a case."""


def _compiler(quick: bool) -> str:
    return "aot_eager" if quick else "inductor"


def _optimizer_by_hand(case: Case, model: Any) -> torch.optim.Optimizer:
    """Return the optimizer, after whose steps all scales of float8 weights are computed together, as in torchtitan."""
    optimizer = make_optimizer(model)
    if case.fp8:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))
    return optimizer


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
        model = make(size)
    return float(count(torchacc.accelerate(model, None, torchacc.Config(backend="native")), size.length) or 0.0)


def largest(deepest: Workload, memory_bytes: float) -> Workload:
    """Return a model with as many layers as one device can train, recomputed in bfloat16, as torchacc plans it.

    Args:
        deepest: A model with more layers than that.
        memory_bytes: What the plan may take.
    """
    layers = bisect_left(
        range(1, deepest.layers + 1),
        True,
        key=lambda layers: planned_bytes(replace(deepest, layers=layers)) > memory_bytes,
    )
    if not layers:
        raise SystemExit(f"{memory_bytes / 1e9:.1f} GB of this device do not hold one layer of {deepest}")
    return replace(deepest, layers=layers)


def planned_bytes(size: Workload, case: Case = RECOMPUTED_CASE, devices: int = 1) -> int:
    """Return what torchacc plans for a step of a model on each of some devices."""
    from torchacc.memory_plan import count_states, study

    with torch.device("meta"):
        model = make(size)
    tokens = torch.zeros(size.batch, size.length, dtype=torch.long, device="meta")
    states = count_states(torch.optim.AdamW, {"lr": 1e-3})
    config = make_config(case, devices)
    batch = {"input_ids": tokens, "labels": tokens}
    step = study(model, batch, config, num_states=states, backend="native")
    return step.on(devices, config.dist.fsdp.sharding_strategy).total


def plans(label: str, size: Workload, cases: Sequence[Case], devices: int) -> dict[str, int]:
    """Return what torchacc plans for a model, by the name of each case that can be planned."""
    return {case.name: planned_bytes(size, case, devices) for case in cases if case.is_planned and case.suits(label)}


def memory_of(device: str, quick: bool) -> float:
    """Return what a plan may take of a device's memory."""
    return TINY_MEMORY if quick else FILLED * float(torch.get_device_module(device).mem_get_info()[1])


def why_no_fp8(device: str) -> str | None:
    """Return why a device cannot multiply in float8; None where it can, or where it is emulated."""
    if device == "cpu":
        return None
    if device != "cuda":
        return f"torchacc knows float8 on NVIDIA GPUs only, and this is {device}"
    found = torch.cuda.get_device_capability()
    return None if found >= FP8_CAPABILITY else f"float8 needs compute capability 8.9, and this GPU has {found}"


def describe(
    device: str, sizes: dict[str, Workload], cases: Sequence[Case], devices: int, matrix_sizes: tuple[int, ...]
) -> dict[str, Any]:
    """Return what the parent has to know: the device's name and peak, and what the models take."""
    name = "CPU" if device == "cpu" else torch.get_device_module(device).get_device_name(0)
    flops = {label: flops_per_token(size) for label, size in sizes.items()}
    return {
        "device": name,
        "matrix_flops": matrix_peak(device, matrix_sizes),
        "flops_per_token": flops,
        "layers": {label: size.layers for label, size in sizes.items()},
        "planned": {label: plans(label, size, cases, devices) for label, size in sizes.items()},
        "why_no_fp8": why_no_fp8(device),
    }


def find_device() -> str | None:
    """Return the kind of this machine's accelerators; None where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else None


def count_devices() -> int:
    """Return the number of this machine's accelerators."""
    return torch.accelerator.device_count()
