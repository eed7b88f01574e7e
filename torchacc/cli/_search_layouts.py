"""`torchacc plan --search`: every layout of a model on so many devices, and the config of the best."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

import yaml

from torchacc.aot.step_report import in_gibibytes
from torchacc.cli import _plan_input
from torchacc.cli._tables import in_columns
from torchacc.config import Config
from torchacc.engines.optimizers import find_optimizer
from torchacc.errors import ConfigError
from torchacc.layouts import DeviceSpeeds, PlannedLayout, Search, find_device, search
from torchacc.layouts.search import grouped
from torchacc.memory_plan import PLANNED_BACKENDS
from torchacc.parallel.axes import AXES, Role, axes_with, axis_with
from torchacc.train.config import StageFSDPConfig

_NOT_BESIDE = ("batch", "strategy", "gc", "platform", "html", "compile_for", *_plan_input.SPLITS)
"""Options that a layout has, or that are of other engines."""
_SHARING_SAMPLES = axes_with(Role.TENSOR, Role.SEQUENCE, Role.PIPELINE)
_NUM_ROWS = 10
_DEFAULT_DEVICE = "h100"


def run(args: argparse.Namespace) -> int:
    """Print what was found, and return the exit status: 1 where nothing fits."""
    given = {name: getattr(args, name) for name in _NOT_BESIDE} | {axis_with(Role.BATCH, Role.REPLICATE): args.dp}
    for name, value in given.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"--search tries the layouts of the native engine by itself: leave {option} out")
    if args.engine is not None and not PLANNED_BACKENDS[args.engine].runs_eagerly:
        raise ConfigError(f"--search with --engine {args.engine}: the layouts are those of the native engine")
    speeds = find_device(args.device or _DEFAULT_DEVICE)
    memory = args.memory or speeds.memory_bytes
    if memory is None:
        raise ConfigError("--search needs what memory a device has: write --memory, such as --memory 16GiB")
    _plan_input.take_devices(args)
    args.engine = _plan_input.eager_engine()
    training = _plan_input.read(args)
    # Devices that compute parts of one step see the same samples.
    shared = prod(getattr(training.config.dist, axis).size for axis in _SHARING_SAMPLES)
    samples = args.global_batch or training.batch * max(1, args.devices // shared)
    if not sys.stderr.isatty():
        sys.stderr.write(f"searching the layouts of {args.devices} devices, which takes minutes\n")
    found = search(
        training.model,
        training.make_batch,
        training.config,
        num_devices=args.devices,
        global_batch=samples,
        memory_bytes=memory,
        speeds=speeds,
        optimizer=find_optimizer(training.optimizer),
        num_states=training.num_states,
        adds_gradients=training.adds_gradients,
        progress=_show_progress,
    )
    _show_progress("")
    base = training.config
    if args.json:
        text = json.dumps(_as_dict(args, training, found, base, samples, memory, speeds), indent=2)
    else:
        text = "\n".join(_as_lines(args, training, found, base, samples, memory, speeds))
    sys.stdout.write(text + "\n")
    return 0 if found.fitting else 1


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _as_lines(
    args: argparse.Namespace,
    training: _plan_input.Training,
    found: Search,
    base: Config,
    samples: int,
    memory: int,
    speeds: DeviceSpeeds,
) -> list[str]:
    numel = sum(parameter.numel() for parameter in training.model.parameters())
    lines = [
        f"{training.name}: {numel:,} parameters, {training.optimizer}",
        f"{samples} x {training.length} tokens on {args.devices} devices ({speeds.name}) with {in_gibibytes(memory)} "
        "each, engine native",
        "",
    ]
    if found.fitting:
        lines += [f"{len(found.fitting)} layouts fit, fastest first by estimate:", ""]
        lines += _table(found.fitting[:_NUM_ROWS])
        more = len(found.fitting) - _NUM_ROWS
        lines += [f"and {more} more; --json has all"] if more > 0 else []
    else:
        lines += ["no layout fits"]
    if found.too_large:
        first = found.too_large[0]
        over = in_gibibytes(first.memory.total - memory)
        lines += ["", f"{len(found.too_large)} need more memory; the closest is {first.candidate.label}, {over} over"]
        if not found.fitting:
            lines += ["", *_table(found.too_large[:_NUM_ROWS]), "", _advice(found)]
    if found.refused:
        lines += ["", f"{len(found.refused)} are refused:"]
        for reason, labels in grouped(found.refused).items():
            others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
            lines.append(f"  {labels[0]}{others}: {reason}")
    if found.fitting:
        first = found.fitting[0]
        if args.config is None:
            lines += ["", "config of the first:", "", _yaml(first, base)]
        else:
            lines += ["", f"the first, in the stage's sections of {args.config}:", "", _stage_yaml(first, base)]
    return lines


def _advice(found: Search) -> str:
    least = found.too_large[0].memory
    parts = asdict(least)
    largest = max(parts, key=lambda name: parts[name])
    if largest == "activations":
        return (
            "most of it is activations: use fewer samples or tokens, --bf16, or more devices on the axis that splits "
            "them"
        )
    instead = {"optimizer": ", or an optimizer with less state", "gathered": ", or --bf16"}.get(largest, "")
    return f"most of it is {largest}: use more devices{instead}"


def _table(rows: Sequence[PlannedLayout]) -> list[str]:
    cells = [["layout", "memory", "step", "computes", "sends", "waits"]]
    for each in rows:
        time = each.time
        parts = (time.compute, time.exposed, time.bubble)
        shares = [f"{part / time.total:.0%}" if time.total else "-" for part in parts]
        cells.append([each.candidate.label, in_gibibytes(each.memory.total), _seconds(time.total), *shares])
    return in_columns(cells)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _yaml(found: PlannedLayout, base: Config) -> str:
    lines = [f"# samples in each batch of the loader: {found.candidate.rows}"]
    return "\n".join([*lines, yaml.safe_dump(found.candidate.options(base), sort_keys=False).rstrip()])


def _stage_yaml(found: PlannedLayout, base: Config) -> str:
    """Return the sections of a training file's stage that say a layout: what it has beside stays as it is."""
    candidate = found.candidate
    options = candidate.options(base)
    dist = {axis: section for axis, section in options.get("dist", {}).items() if axis in AXES}
    for name in StageFSDPConfig.model_fields:  # which a file has in a section of its own
        dist.get(axis_with(Role.BATCH, Role.SHARD), {}).pop(name, None)
    distributed, _, fsdp = StageFSDPConfig.path.partition(".")
    sections = {
        "training": {"batch_size": candidate.rows},
        distributed: {
            "engine": options["backend"],
            fsdp: {"sharding_strategy": candidate.strategy, "activation_checkpointing": candidate.recompute},
        },
        "torchacc": {"dist": dist, "memory": {"gc": candidate.recompute}},
    }
    lines = [f"# with num_nodes x devices = {prod(candidate.sizes.values())}"]
    return "\n".join([*lines, yaml.safe_dump(sections, sort_keys=False).rstrip()])


def _as_dict(
    args: argparse.Namespace,
    training: _plan_input.Training,
    found: Search,
    base: Config,
    samples: int,
    memory: int,
    speeds: DeviceSpeeds,
) -> dict[str, Any]:
    return {
        "model": training.name,
        "devices": args.devices,
        "device": asdict(speeds),
        "memory": memory,
        "global_batch": samples,
        "seq": training.length,
        "fitting": [_found_as_dict(each, base) for each in found.fitting],
        "too_large": [_found_as_dict(each, base) for each in found.too_large],
        "refused": dict(found.refused),
    }


def _found_as_dict(found: PlannedLayout, base: Config) -> dict[str, Any]:
    return {
        "layout": found.candidate.label,
        "sizes": dict(found.candidate.sizes),
        "batch_size": found.candidate.rows,
        "bytes": {**asdict(found.memory), "total": found.memory.total},
        "seconds": {**asdict(found.time), "total": found.time.total},
        "config": found.candidate.options(base),
    }
