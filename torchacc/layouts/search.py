"""Try every layout of a model on so many devices: which are refused and why, which fit, and which should be fastest."""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from torchacc.config import Config, resolve
from torchacc.engines.native.native_engine import check_axes
from torchacc.engines.optimizers import ELEMENTWISE, check_split
from torchacc.env import Job
from torchacc.errors import ConfigError
from torchacc.layouts.estimate import StepTime, estimate
from torchacc.layouts.speeds import DeviceSpeeds
from torchacc.memory_plan import DeviceBytes, Step, study
from torchacc.parallel.axes import AXES, MODEL_PARALLEL, Role, axes_with, axis_with
from torchacc.parallel.mesh import Mesh, from_config

_REPLICAS, _SHARDS = axis_with(Role.BATCH, Role.REPLICATE), axis_with(Role.BATCH, Role.SHARD)
_STAGES = axis_with(Role.PIPELINE)
_PARTS = axis_with(Role.TENSOR)
_MICROBATCHES_PER_STAGE = 4
_ENGINE: Literal["native"] = "native"

MakeBatch = Callable[[int], Mapping[str, torch.Tensor]]
"""Returns a batch of so many samples, on the meta device."""


@dataclass(frozen=True)
class Candidate:
    """One layout."""

    sizes: Mapping[str, int]
    """Of all axes, by name."""
    strategy: str
    recompute: bool
    rows: int
    """Samples of a batch, of the devices that see the same data."""
    num_microbatches: int = 1

    @property
    def label(self) -> str:
        """The layout in a few words."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        return f"{axes}, {self.strategy}{', recompute' if self.recompute else ''}"

    def options(self, base: Config) -> dict[str, Any]:
        """Return the options of a config by their sections: what a YAML file has.

        Args:
            base: What is the same in all layouts: precision and kernels.
        """
        config = self.apply(base)
        default = Config().to_dict()
        return _changed(config.to_dict(), default)

    def apply(self, base: Config) -> Config:
        """Return a config with this layout; of the rest it is a copy."""
        config = deepcopy(base)
        config.backend = _ENGINE
        for axis, size in self.sizes.items():
            getattr(config.dist, axis).size = size
        config.dist.fsdp.sharding_strategy = self.strategy  # type: ignore[assignment]
        config.dist.pp.num_microbatches = self.num_microbatches if self.sizes[_STAGES] > 1 else None
        config.dist.pp.schedule = "1f1b" if self.sizes[_STAGES] > 1 else "gpipe"  # which holds fewer activations
        config.memory.gc = self.recompute
        if not self.recompute:  # what says which modules are recomputed would be refused
            for name in ("gc_cls", "gc_every", "gc_cnt", "gc_policy"):
                setattr(config.memory, name, getattr(Config().memory, name))
        return config


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that the engine accepts."""

    candidate: Candidate
    memory: DeviceBytes
    """Of the device that needs the most."""
    time: StepTime


@dataclass(frozen=True)
class Search:
    """What came of all layouts."""

    fitting: tuple[PlannedLayout, ...]
    """The fastest first."""
    too_large: tuple[PlannedLayout, ...]
    """Those that need more memory than there is, the smallest first."""
    refused: Mapping[str, str]
    """Layouts that are refused -> the reason."""


def search(
    model: nn.Module,
    make_batch: MakeBatch,
    config: Config,
    *,
    num_devices: int,
    global_batch: int,
    memory_bytes: int,
    speeds: DeviceSpeeds,
    optimizer: type[torch.optim.Optimizer],
    num_states: int,
    adds_gradients: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Search:
    """Try all products of axes that are so many devices, with each strategy, with and without recompute.

    Args:
        model: On the meta device, in training mode.
        make_batch: Returns a batch.
        config: What is the same in all layouts: precision and kernels.
        num_devices: All devices.
        global_batch: Samples of a forward and backward, of all devices.
        memory_bytes: What each device has.
        speeds: The devices'.
        optimizer: Its class.
        num_states: Tensors in a parameter's shape that the optimizer keeps for it.
        adds_gradients: Whether a step is of several such batches.
        progress: Is told what is tried.
    """
    found: list[PlannedLayout] = []
    refused: dict[str, str] = {}
    layouts = list(_inner_sizes(num_devices))
    for number, inner in enumerate(layouts):
        label = " x ".join(f"{axis} {size}" for axis, size in inner.items() if size > 1) or "data parallel"
        if progress is not None:
            progress(f"{number + 1} of {len(layouts)}: {label}")
        try:
            check_split(
                optimizer.__name__,
                is_elementwise=optimizer.__name__ in ELEMENTWISE,
                num_stages=inner[_STAGES],
                num_parts=inner[_PARTS],
            )
            look = partial(study, model, num_states=num_states, backend=_ENGINE, adds_gradients=adds_gradients)
            tried = _try(model, make_batch, config, inner, num_devices, global_batch, look)
            for candidate, step in tried:
                try:
                    _check(model, candidate.apply(config), num_devices)
                    found.append(_look_at(candidate, step, speeds, num_devices))
                except ConfigError as error:
                    refused[candidate.label] = str(error)
        except ConfigError as error:
            refused[label] = str(error)
    fitting = [each for each in found if each.memory.total <= memory_bytes]
    too_large = [each for each in found if each.memory.total > memory_bytes]
    return Search(
        tuple(sorted(fitting, key=lambda each: (each.time.total, each.memory.total))),
        tuple(sorted(too_large, key=lambda each: each.memory.total)),
        refused,
    )


def _inner_sizes(num_devices: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes along which devices compute other parts of one step, none of them first."""
    sizes: list[dict[str, int]] = [{}]
    for axis in axes_with(*MODEL_PARALLEL):
        sizes = [{**before, axis: size} for before in sizes for size in _divisors(num_devices // prod(before.values()))]
    yield from sorted(sizes, key=lambda each: (sum(size > 1 for size in each.values()), prod(each.values())))


def _try(
    model: nn.Module,
    make_batch: MakeBatch,
    config: Config,
    inner: Mapping[str, int],
    num_devices: int,
    samples: int,
    look: Callable[..., Step],
) -> Iterator[tuple[Candidate, Step]]:
    """Yield the layouts with these sizes, and what is known of their step.

    Raises:
        ConfigError: The engine does not accept them for this model, or the samples do not divide.
    """
    outer = num_devices // prod(inner.values())
    smallest = Candidate({**dict.fromkeys(AXES, 1), **inner, _SHARDS: outer}, "FULL_SHARD", False, 1).apply(config)
    mesh = _check(model, smallest, num_devices)
    if samples % mesh.data_parallel_size:
        raise ConfigError(
            f"a global batch of {samples} samples does not divide over {mesh.data_parallel_size} parts of the data"
        )
    rows = samples // mesh.data_parallel_size
    most = _MICROBATCHES_PER_STAGE * mesh.size(Role.PIPELINE)
    count = max(each for each in _divisors(rows) if each <= most) if mesh.size(Role.PIPELINE) > 1 else 1
    for recompute in (False, True):
        whole = Candidate({**dict.fromkeys(AXES, 1), **inner}, "FULL_SHARD", recompute, rows, count)
        step = look(make_batch(rows), whole.apply(config))
        for replicas in _divisors(outer):
            for strategy in _strategies(replicas, outer // replicas, mesh.num_shards // outer):
                sizes = {**whole.sizes, _REPLICAS: replicas, _SHARDS: outer // replicas}
                yield Candidate(sizes, strategy, recompute, rows, count), step


def _check(model: nn.Module, config: Config, num_devices: int) -> Mesh:
    """Return the mesh of a config.

    Raises:
        ConfigError: The engine does not accept it for this model.
    """
    resolved = resolve(config, Job(num_processes=num_devices), num_devices=num_devices)
    mesh = from_config(resolved)
    check_axes(resolved, mesh, model)
    return mesh


def _strategies(replicas: int, shards: int, inner_shards: int) -> list[str]:
    """Return the strategies that differ for so many copies, shards over `fsdp`, and shards over other axes."""
    if shards * inner_shards == 1:
        return ["FULL_SHARD"] if replicas == 1 else ["NO_SHARD"]
    is_hybrid = replicas > 1 and shards > 1
    return ["HYBRID_SHARD" if is_hybrid else "FULL_SHARD", "SHARD_GRAD_OP"]


def _look_at(candidate: Candidate, step: Step, speeds: DeviceSpeeds, num_devices: int) -> PlannedLayout:
    plan = step.plan_on(num_devices, candidate.strategy, replicas=candidate.sizes[_REPLICAS])
    return PlannedLayout(candidate, step.needed_by(plan), estimate(step, plan, speeds))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _changed(values: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ, in their sections."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(default.get(name), dict):
            below = _changed(value, default[name])
            changed |= {name: below} if below else {}
        elif value != default.get(name):
            changed[name] = value
    return changed


def grouped(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Return what is lacking -> the layouts that lack it, reasons that differ in sizes alone together."""
    groups: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for label, reason in refused.items():
        groups.setdefault(first.setdefault(re.sub(r"\d+", "#", reason), reason), []).append(label)
    return groups
