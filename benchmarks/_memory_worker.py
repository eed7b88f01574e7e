"""One process of `memory.py`: it drives a number of devices, and answers each line on stdin with one on stdout."""

import gc
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from _hlo import take_programs, training_program
from _machine import OtherWork
from _memory_cases import Case, Workload
from _models import MAKERS
from _rivals import wrap_fsdp_v2
from _training import Steps, endless, make_optimizer, make_samples, train, train_by_hand
from _worker import answer, keep_stdout_for_answers
from torch.utils.data import DataLoader

import torchacc
from torchacc.memory_plan import study

STEPS = 2  # where the optimizer makes its state in the first, the second compiles anew


def run(dump: Path) -> None:
    """Answer questions until stdin ends.

    `{"case": {...}, "steps": s}` is answered with the buffers and the traffic of one device, the parameters and the
    last loss; `{"plan": {...}}` with what `torchacc plan` says of the case;
    `{"time": [{...}, {...}], "rounds": r, "steps": s}` with what `take_turns()` returns. `{"compile": {...}}` compiles
    a step of the case, which ends the process.

    Args:
        dump: The folder that XLA writes its programs to.
    """
    answers = keep_stdout_for_answers()
    answer(answers, setup_secs=0.0)
    for line in sys.stdin:
        question = json.loads(line)
        if "case" in question:
            found = measure(_case(question["case"]), dump, question.get("steps", STEPS))
        elif "compile" in question:
            compile_alone(_case(question["compile"]))
        elif "plan" in question:
            found = plan(_case(question["plan"]))
        else:
            found = take_turns([_case(given) for given in question["time"]], question["rounds"], question["steps"])
        answer(answers, **found)


def measure(case: Case, dump: Path, steps: int) -> dict[str, Any]:
    """Train for some steps, and return what XLA planned for the last of them."""
    take_programs(dump)
    trained, num_parameters = make(case)
    for _ in range(steps):
        loss = next(trained)
    value = loss.item()
    del trained
    gc.collect()
    buffers, traffic = training_program(take_programs(dump))
    return {
        "buffers": asdict(buffers),
        "traffic": {kind: asdict(found) for kind, found in traffic.items()},
        "num_parameters": num_parameters,
        "loss": value,
    }


def compile_alone(case: Case) -> NoReturn:
    """Compile a step of a case whose weights are whole on each device, without those: XLA ends a process that runs it.

    What is compiled is the same, to the byte, as a tensor that no sharding is known of is whole on each device.
    """
    import torch_xla.core.xla_builder as xb

    from torchacc.engines.xla import runtime

    to_device = runtime.to_device

    def hold_no_weights(tensors: Any, shardings: Any = None) -> list[torch.Tensor]:
        if not all(tensor.is_floating_point() and tensor.dim() for tensor in tensors):
            return to_device(tensors, shardings)
        return [xb.create_placeholder_tensor(list(tensor.shape), tensor.dtype) for tensor in tensors]

    runtime.to_device = hold_no_weights
    trained, _ = make(case)
    next(trained).item()
    raise AssertionError("a step has run without weights")


def plan(case: Case) -> dict[str, int]:
    """Return what the memory plan says of a case, before it is run."""
    size = case.workload
    with torch.device("meta"):
        model = make_model(size)
        tokens = torch.zeros(size.batch // case.devices, size.length, dtype=torch.long)
    config = torchacc.Config()
    config.memory.gc, config.compute.bf16 = case.recompute, case.bf16
    step = study(model, {"input_ids": tokens, "labels": tokens}, config, num_states=2, platform="cpu")
    needed = step.on(case.devices, case.strategy, replicas=case.dp)
    return {**asdict(needed), "total": needed.total}


def make_model(size: Workload) -> Any:
    """Return a workload's model."""
    return MAKERS[size.family](size.layers, size.width, size.heads, size.vocabulary, size.length)


def take_turns(cases: list[Case], rounds: int, steps: int) -> dict[str, Any]:
    """Let the cases take blocks of steps in turns, every second round backwards, and time them.

    Returns:
        `secs` of a step, by case and round; and `other_cores`, those that were busy meanwhile with anything else.
    """
    ready = [make(case)[0] for case in cases]
    for trained in ready:
        for _ in range(STEPS + 1):
            next(trained).item()
    other_work, cpu = OtherWork(), time.process_time()
    secs: list[list[float]] = [[0.0] * rounds for _ in cases]
    for index in range(rounds):
        for which in range(len(ready)) if index % 2 == 0 else reversed(range(len(ready))):
            started = time.perf_counter()
            for _ in range(steps):
                loss = next(ready[which])
            loss.item()
            secs[which][index] = (time.perf_counter() - started) / steps
    return {"secs": secs, "other_cores": other_work.cores(time.process_time() - cpu)}


def make(case: Case) -> tuple[Steps, int]:
    """Return what trains a case, and how many parameters it has."""
    size = case.workload
    model = make_model(size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(case.workload.vocabulary, (case.workload.batch, case.workload.length), generator=generator)
    build = _fsdp_v2 if case.strategy.startswith("FSDPv2") else _torchacc
    return build(case, model, tokens), num_parameters


def _torchacc(case: Case, model: Any, tokens: torch.Tensor) -> Steps:
    config = torchacc.Config(backend="xla")
    config.memory.gc, config.compute.bf16 = case.recompute, case.bf16
    config.dist.dp.size = case.dp
    config.dist.fsdp.size = case.devices // case.dp
    config.dist.fsdp.sharding_strategy = case.strategy
    config.dist.fsdp.use_spmd = True
    loader: DataLoader[Any] = DataLoader(make_samples(tokens), len(tokens) // case.devices)
    model, sharded = torchacc.accelerate(model, loader, config)
    return train(model, make_optimizer(model), endless(sharded))


def _fsdp_v2(case: Case, model: Any, tokens: torch.Tensor) -> Steps:
    """torch_xla's own class around each block and the model, as it is or with what torchacc does to a model for XLA.

    Gradients are freed before the step's program ends in both.
    """
    import numpy as np
    import torch_xla.distributed.spmd as xs

    from torchacc.engines.patches import model_patches
    from torchacc.engines.xla import runtime

    runtime.use_plain_scheduler(recomputes=False)
    runtime.start(num_devices=case.devices, spmd=True)
    mesh = xs.Mesh(np.arange(case.devices), (case.devices,), ("fsdp",))
    model = model.to("xla")
    model.tie_weights()
    prepared = case.strategy == "FSDPv2, prepared"
    if prepared:
        model_patches.prepare(model, partitioned=True)

    wrapped = wrap_fsdp_v2(model, mesh)
    batch = tokens.to("xla")
    xs.mark_sharding(batch, mesh, ("fsdp", None))

    def forward(**inputs: torch.Tensor) -> Any:
        with model_patches.patches() if prepared else nullcontext():
            return wrapped(**inputs)

    batches = endless([{"input_ids": batch, "labels": batch}])
    return train_by_hand(forward, make_optimizer(wrapped), batches, lambda tensor: tensor)


def _case(given: dict[str, Any]) -> Case:
    return Case(**{**given, "workload": Workload(**given["workload"])})
