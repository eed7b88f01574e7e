"""One process of one case of `step_time.py`: it sets up, then takes blocks of steps as it is told on stdin."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import _step_memory
import torch
from _cases import GLOBAL_BATCH, HEADS, LEARNING_RATE, LENGTH, VOCABULARY, WIDTH, Case
from _models import make_gpt2
from torch import nn
from torch.utils.data import DataLoader

Batch = dict[str, torch.Tensor]
Steps = Iterator[torch.Tensor]
"""Takes one training step each time that it is asked, and gives the step's loss."""


def run(case: Case, total_steps: int) -> None:
    """Set a case up, and take its steps as `serve()` is told.

    Args:
        case: What to run.
        total_steps: Steps for which there are samples.
    """
    serve(lambda: BUILDERS[case.kind](case, make_tokens(total_steps)))
    if torch.distributed.is_initialized() and case.kind == "fsdp2":
        torch.distributed.destroy_process_group()


def serve(build: Callable[[], Steps]) -> None:
    """Build a training loop, and answer each line on stdin until that ends.

    `{"steps": n}` is answered with the timing of that many steps, `{"memory": true}` with what `_step_memory.measure()`
    finds in the next one.
    """
    answers = _keep_stdout_for_answers()
    started = time.perf_counter()
    steps = build()
    _answer(answers, setup_secs=time.perf_counter() - started)
    cpu = time.process_time()
    for line in sys.stdin:
        idle_cpu_secs, question = time.process_time() - cpu, json.loads(line)
        if "memory" in question:
            _answer(answers, **_step_memory.measure(lambda: next(steps)))
        else:
            _answer(answers, idle_cpu_secs=idle_cpu_secs, **_time_block(steps, question["steps"]))
        cpu = time.process_time()


def make_model(layers: int) -> Any:
    """Return the model, with the same values in every process."""
    return make_gpt2(layers, WIDTH, HEADS, VOCABULARY, LENGTH)


def make_tokens(num_batches: int) -> torch.Tensor:
    """Return samples (num_batches * GLOBAL_BATCH, LENGTH); small tokens are frequent, so that there is much to learn.

    With tokens that are all equally frequent, a case that does not train would show the same loss as one that does.
    """
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(num_batches * GLOBAL_BATCH, LENGTH, generator=generator, dtype=torch.float64)
    return (uniform**4 * VOCABULARY).long()


def _eager(case: Case, tokens: torch.Tensor) -> Steps:
    model = make_model(case.layers)
    return _train(model, _optimizer(model), _batches(tokens))


def _compiled(case: Case, tokens: torch.Tensor) -> Steps:
    model = make_model(case.layers)
    return _train(torch.compile(model), _optimizer(model), _batches(tokens))


def _fsdp2(case: Case, tokens: torch.Tensor) -> Steps:
    """FSDP2 as its tutorial has it: each block and the root, each process with its share of the cores."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // case.processes))
    model = make_model(case.layers)
    mesh = init_device_mesh("cpu", (case.processes,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model, _optimizer(model), _batches(tokens, torch.distributed.get_rank(), case.processes))


def _torch_xla(case: Case, tokens: torch.Tensor) -> Steps:
    """One XLA device by hand: weights tied again after the move, no gradient alive when the step runs."""
    import torch_xla

    device = torch_xla.device()
    model = make_model(case.layers).to(device)
    model.tie_weights()
    return _train_by_hand(model, _optimizer(model), _batches(tokens), device)


def _torchacc(case: Case, tokens: torch.Tensor) -> Steps:
    """Any engine of torchacc, as a user calls it, its loader included."""
    import torchacc

    samples: Any = [{"input_ids": row, "labels": row} for row in tokens]
    loader: DataLoader[Batch] = DataLoader(samples, batch_size=GLOBAL_BATCH // case.total_devices)
    config = torchacc.Config()
    config.backend = "native" if case.kind == "native" else "xla"
    config.dist.fsdp.size = case.total_devices
    config.dist.fsdp.use_spmd = case.kind == "xla-spmd"
    config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}
    config.compute.scan_layers = case.scans
    model, loader = torchacc.accelerate(make_model(case.layers), loader, config)
    return _train(model, _optimizer(model), loader)


BUILDERS: dict[str, Callable[[Case, torch.Tensor], Steps]] = {
    "eager": _eager,
    "compile": _compiled,
    "fsdp2": _fsdp2,
    "torch_xla": _torch_xla,
    "native": _torchacc,
    "xla-spmd": _torchacc,
    "xla-multiprocess": _torchacc,
}


def _train(model: Any, optimizer: torch.optim.Optimizer, batches: Any) -> Steps:
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        yield loss.detach()


def _train_by_hand(
    model: Any, optimizer: torch.optim.Optimizer, batches: Iterator[Batch], device: torch.device
) -> Steps:
    import torch_xla

    for batch in batches:
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**on_device).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        yield loss.detach()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def _batches(tokens: torch.Tensor, rank: int = 0, processes: int = 1) -> Iterator[Batch]:
    """Cut samples into global batches, and these into one part for each process."""
    for whole in torch.split(tokens, GLOBAL_BATCH):
        part = whole.chunk(processes)[rank]
        yield {"input_ids": part, "labels": part}


def _time_block(steps: Steps, num_steps: int) -> dict[str, float]:
    cpu, started = time.process_time(), time.perf_counter()
    for _ in range(num_steps):
        loss = next(steps)
    value = loss.item()
    wait_for_devices()
    secs = time.perf_counter() - started
    return {"secs": secs, "cpu_secs": time.process_time() - cpu, "loss": value, "compiles": num_compiles()}


def wait_for_devices() -> None:
    """Wait until what has been started on the devices is done."""
    if "torch_xla" in sys.modules:
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()


def num_compiles() -> int:
    """Return the programs that XLA, or the graphs that torch.compile, has compiled in this process."""
    if "torch_xla" in sys.modules:
        import torch_xla.debug.metrics as metrics

        timing = metrics.metric_data("CompileTime")
        return timing[0] if timing else 0
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def _keep_stdout_for_answers() -> TextIO:
    """Return what was stdout, and send what libraries print there to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
