"""One process of one case of `step_time.py`: it sets up, then takes blocks of steps as it is told on stdin."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import _rivals
import _step_memory
import torch
from _cases import GLOBAL_BATCH, Case
from _training import CannotRunError, Steps, make_model, make_tokens, train_sharded


def run(case: Case, total_steps: int) -> None:
    """Set a case up, and take its steps as `serve()` is told.

    Args:
        case: What to run.
        total_steps: Steps for which there are samples.
    """
    serve(lambda: BUILDERS[case.kind](case, make_tokens(total_steps)))
    if torch.distributed.is_initialized() and case.kind not in TORCHACC:
        torch.distributed.destroy_process_group()


def serve(build: Callable[[], Steps], facts: Callable[[], dict[str, Any]] = dict) -> None:
    """Build a training loop, and answer each line on stdin until that ends.

    Its own first line says how long building took, or `{"cannot_run": why}`. `{"steps": n}` is answered with the timing
    and the losses of that many steps, `{"memory": true}` with what `_step_memory.measure()` finds in the next one, and
    `{"facts": true}` with the facts.

    Args:
        build: Makes the loop.
        facts: Says what else there is to ask for.
    """
    answers = keep_stdout_for_answers()
    started = time.perf_counter()
    try:
        steps = build()
    except CannotRunError as reason:
        answer(answers, cannot_run=str(reason))
        return
    answer(answers, setup_secs=time.perf_counter() - started)
    cpu = time.process_time()
    for line in sys.stdin:
        idle_cpu_secs, question = time.process_time() - cpu, json.loads(line)
        if "memory" in question:
            answer(answers, **_step_memory.measure(lambda: next(steps)))
        elif "facts" in question:
            answer(answers, **facts())
        else:
            answer(answers, idle_cpu_secs=idle_cpu_secs, **_time_block(steps, question["steps"]))
        cpu = time.process_time()


def _torchacc(case: Case, tokens: torch.Tensor) -> Steps:
    """Any engine of torchacc, as a user calls it, its loader included."""
    import torchacc

    config = torchacc.Config()
    config.backend = "native" if case.kind.startswith("native") else "xla"
    config.dist.fsdp.sharding_strategy = "NO_SHARD" if case.kind == "native-no-shard" else "FULL_SHARD"
    config.dist.fsdp.size = case.total_devices
    config.dist.fsdp.use_spmd = case.kind == "xla-spmd"
    config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}
    config.compute.scan_layers = case.scans
    if case.kind == "native-compile":  # an earlier checkout may not know the option
        config.compute.compile = True
    return train_sharded(make_model(case.layers), tokens, GLOBAL_BATCH // case.total_devices, config)


TORCHACC = ("native", "native-compile", "native-no-shard", "xla-spmd", "xla-multiprocess")
BUILDERS: dict[str, Callable[[Case, torch.Tensor], Steps]] = {**_rivals.BUILDERS, **dict.fromkeys(TORCHACC, _torchacc)}
"""By the kind of a case."""


def _time_block(steps: Steps, num_steps: int) -> dict[str, Any]:
    cpu, started = time.process_time(), time.perf_counter()
    losses = [next(steps) for _ in range(num_steps)]
    wait_for(losses[-1])
    secs, cpu_secs = time.perf_counter() - started, time.process_time() - cpu
    return {"secs": secs, "cpu_secs": cpu_secs, "losses": [loss.item() for loss in losses], "compiles": num_compiles()}


def wait_for(loss: torch.Tensor) -> None:
    """Wait until a step is done, whose loss this is, and all that its device has been given."""
    loss.item()
    if loss.device.type == "xla":  # not where torch_xla is only imported: asking would start its runtime
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()


def num_compiles() -> int:
    """Return the programs that XLA, and the graphs that torch.compile, has compiled in this process."""
    compiled = 0
    if "torch_xla" in sys.modules:
        import torch_xla.debug.metrics as metrics

        compiled += (metrics.metric_data("CompileTime") or [0])[0]
    dynamo = sys.modules.get("torch._dynamo.utils")
    return compiled + (dynamo.counters["stats"]["unique_graphs"] if dynamo else 0)


def keep_stdout_for_answers() -> TextIO:
    """Return what was stdout, and send what libraries print there to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def answer(answers: TextIO, **values: Any) -> None:
    """Answer a question with one line."""
    answers.write(json.dumps(values) + "\n")
