"""`torchacc plan --compile-for v5e:2x4`: compile a training step by the compiler of devices that need not be there."""

import argparse
import json
import os
import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

from torchacc.aot.compiler import check_installed, compile_program
from torchacc.aot.recorded_step import MakeOptimizer, record_step
from torchacc.aot.step_report import make_report
from torchacc.aot.topologies import Topology, find_topology
from torchacc.cli import _plan_input
from torchacc.config import Config
from torchacc.engines.optimizers import find_optimizer
from torchacc.errors import ConfigError
from torchacc.memory_plan import PLANNED_BACKENDS, study


def run(args: argparse.Namespace) -> int:
    """Print what the compiler says, and return the exit status."""
    topology = find_topology(args.compile_for)
    _take_devices(args, topology)
    check_installed(topology.chip.platform)
    if args.html is not None:
        _check_folder(Path(args.html))
    training = _plan_input.read(args)
    if training.adds_gradients:
        raise ConfigError(
            "--compile-for compiles a step of one batch, and training.gradient_accumulation_steps asks for several: "
            "set it to 1 to compile without"
        )
    for_plan = replace(training, model=deepcopy(training.model))  # planned afterwards: autograd is to know XLA first
    strategy = args.strategy[0] if args.strategy else training.strategy
    replicas = _plan_input.replicas(args, training.config, strategy)
    config = _config(training.config, topology, strategy, replicas)
    shards = topology.num_devices // (config.dist.tp.size * config.dist.sp.size)
    batch = training.make_batch(training.batch * shards, with_positions=training.is_packed)
    make_optimizer = optimizer_of(training)
    program = record_step(
        training.model,
        batch,
        config,
        make_optimizer,
        num_devices=topology.num_devices,
        platform=topology.chip.platform,
        clips=training.clips,
    )
    try:
        compiled = compile_program(program, topology, partial(_show_progress, topology.name))
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstopped compiling for {topology.name}: nothing of it is kept\n")
        raise
    room = topology.device_bytes(config.memory.gpu_fraction)
    report = make_report(compiled, topology, room, _planned_bytes(for_plan, topology, strategy, replicas))
    copies = f", {replicas} copies" if replicas > 1 else ""
    title = f"{training.name}: {training.batch} x {training.length} tokens on each device, {strategy}{copies}"
    described = {
        "model": training.name,
        "batch": training.batch,
        "seq": training.length,
        "strategy": strategy,
        "replicas": replicas,
    }
    text = json.dumps(described | report.as_dict(), indent=2) if args.json else f"{title}\n{report.as_text()}"
    sys.stdout.write(text + "\n")
    if args.html is not None:
        try:
            Path(args.html).write_text(report.as_html(training.name), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {args.html} cannot be written: {error}; name another file") from None
    return 0


def _check_folder(page: Path) -> None:
    """Refuse a page that could not be written after minutes of compiling."""
    if not page.parent.is_dir():
        raise ConfigError(f"--html {page}: there is no folder {page.parent}; make it, or name another file")
    if page.is_dir() or not os.access(page if page.exists() else page.parent, os.W_OK):
        raise ConfigError(f"--html {page} cannot be written; name another file")


def _take_devices(args: argparse.Namespace, topology: Topology) -> None:
    """Complete the options of devices by the topology."""
    if args.devices not in (None, topology.num_devices):
        raise ConfigError(f"--devices {args.devices}, and {topology.name} has {topology.num_devices}: leave it out")
    if args.engine is not None and PLANNED_BACKENDS[args.engine].runs_eagerly:
        raise ConfigError(f"--compile-for compiles what XLA runs: leave --engine {args.engine} out")
    platform = topology.chip.platform.lower()
    if args.platform not in (None, platform):
        raise ConfigError(
            f"--compile-for {topology.name} is for {topology.chip.name}: leave --platform {args.platform} out"
        )
    if args.memory is not None:
        raise ConfigError(f"--memory, and --compile-for {topology.name} knows what its devices have: leave it out")
    if len(args.strategy or ()) > 1:
        raise ConfigError("--compile-for compiles one strategy at a time, in minutes: name one")
    args.devices, args.platform = topology.num_devices, platform


def _config(config: Config, topology: Topology, strategy: str, replicas: int) -> Config:
    config = deepcopy(config)
    others = replicas * prod(getattr(config.dist, axis).size for axis in _plan_input.SPLITS)
    if topology.num_devices % others:
        raise ConfigError(f"{topology.name} has {topology.num_devices} devices, which do not divide by {others}")
    config.dist.dp.size, config.dist.fsdp.size = replicas, topology.num_devices // others
    config.dist.fsdp.sharding_strategy = strategy  # type: ignore[assignment]
    return config


def _planned_bytes(training: _plan_input.Training, topology: Topology, strategy: str, replicas: int) -> int | None:
    """Return what the memory plan says of a device; None where it cannot plan such a step."""
    try:
        batch = training.make_batch(training.batch)
        step = study(training.model, batch, training.config, num_states=training.num_states)
        return step.on(topology.num_devices, strategy, replicas=replicas).total
    except ConfigError:
        return None


def optimizer_of(training: _plan_input.Training) -> MakeOptimizer:
    """Return what makes the optimizer of a training, with its options."""
    return partial(find_optimizer(training.optimizer), **training.optimizer_options)


def _show_progress(name: str, seconds: float) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rcompiling for {name}: {seconds:.0f} s")
        sys.stderr.flush()
