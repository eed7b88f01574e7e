"""Load a checkpoint into a model that is being trained, whatever engine and number of devices wrote it."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchacc.checkpoint import hf, model_state, optimizer_state
from torchacc.checkpoint.call_checks import path_first
from torchacc.checkpoint.model_tensors import ModelTensors, check_tensors, find_by_name
from torchacc.checkpoint.own_format import json_codec
from torchacc.checkpoint.own_format.checkpoint_folder import CheckpointFolder, StoredTensor
from torchacc.checkpoint.own_format.manifest import token_of
from torchacc.checkpoint.run_state import (
    check_random_states,
    check_same_structure,
    reraise_as_corrupt,
    set_random_state,
)
from torchacc.engines import quantized_state
from torchacc.engines.optimizers import is_for_each_element
from torchacc.engines.sharded_model import ShardedModel, sharded_model
from torchacc.errors import CheckpointError
from torchacc.logging import get_logger
from torchacc.parallel.sharding import LocalShard

_log = get_logger(__name__)

_SETTINGS = ("lr", "weight_decay")
"""Of optimizers, what scripts change between runs."""


@path_first("torchacc.checkpoint.load(folder, model=model, optimizer=optimizer)")
def load(
    path: str | PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    loader: Any = None,
) -> Any:
    """Load a checkpoint that any engine, on any number of devices, has saved. Collective: call it on every process.

    Each process reads its own shards only, and verifies their checksums. A Hugging Face checkpoint in safetensors loads
    too, without an optimizer.

    Args:
        path: The folder.
        model: The model that `accelerate()` returned. If it was built on the meta device, this call gives it its
            weights.
        optimizer: Its optimizer, with the same parameter groups as when it was saved. It may have made steps already.
        scheduler: The object that was saved as the scheduler.
        loader: The loader that `accelerate()` returned. It resumes at the batch after the last one that was used.

    Returns:
        The object that was saved as `extra`.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or does not fit the model. Raised on every process. A
            partly loaded model or optimizer refuses to run until another load succeeds.
    """
    sharded = sharded_model(model)
    group = sharded.engine.group
    group.expect_all("torchacc.checkpoint.load()")
    sharded.engine.sync()
    plan = group.call_on_all(lambda: _planned(sharded, path, _Parts(optimizer, scheduler, loader)))
    with plan.folder:
        with sharded.status.loading(path, optimizer):
            group.call_on_all(plan.execute)
            sharded.engine.sync()
        set_random_state(sharded, plan.random_states)  # comes last, as whatever is run moves XLA's seed
    return plan.extra


def verify(path: str | PathLike[str]) -> None:
    """Read a torchacc checkpoint completely and verify its checksums. Not collective: any process may call it.

    If another process replaces the checkpoint in the meantime, the new one is verified.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, and the message names the file and the tensor; or it
            was removed.
    """
    target = Path(path)
    while True:
        before = token_of(target)
        try:
            with CheckpointFolder(target) as folder, reraise_as_corrupt(target):
                return folder.verify()
        except CheckpointError:
            now = token_of(target)
            if now == before or (now is None and target.exists()):
                raise
            if now is None:
                raise CheckpointError(
                    f"{target} was removed while it was read, say by the run that keeps its newest checkpoints only: "
                    "verify another one"
                ) from None


@dataclass(frozen=True)
class _Parts:
    """What is loaded beside the model."""

    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    loader: Any


@dataclass(frozen=True)
class _ShardRead:
    """What one process reads of tensors that are sharded like a parameter."""

    parameter: nn.Parameter
    local_shard: LocalShard
    tensors: Mapping[str, StoredTensor]
    dtype: torch.dtype

    def read(self, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return the shard, flat, on the host.

        Args:
            memory: Where to read it to, of what it replaces; not used if it is of another size or dtype.
        """
        numel = sum(part.numel for part in self.local_shard.slices)
        fits = memory is not None and memory.dtype == self.dtype and len(memory) == numel
        local = memory if memory is not None and fits else torch.empty(numel, dtype=self.dtype)
        for part in self.local_shard.slices:
            self.tensors[part.name].fill(local[part.offset : part.offset + part.numel], part.start)
        return local


@dataclass
class _LoadPlan:
    """What one process reads of a checkpoint, and where it goes. Made before anything is changed."""

    sharded: ShardedModel
    folder: CheckpointFolder
    parts: _Parts
    parameters: list[_ShardRead]
    buffers: list[tuple[torch.Tensor, StoredTensor]]
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's groups, as its `state_dict()` has them."""
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The optimizer's states by the parameter's number: plain values, and `_ShardRead`s and `StoredTensor`s."""
    run: Mapping[str, Any] | None = None
    """What `state.json` says; None where there is none."""

    @property
    def extra(self) -> Any:
        """What the user has saved beside."""
        return self.run["extra"] if self.run is not None else None

    @property
    def random_states(self) -> list[dict[str, Any]]:
        """The states of the generators of each process that saved."""
        return self.run["random"] if self.run is not None else []

    @torch.no_grad()
    def execute(self) -> None:
        """Read, one tensor at a time, and put it where it belongs."""
        if self.sharded.engine.job.rank == 0:
            self.folder.verify_headers()
        for planned in self.parameters:
            self.sharded.shards.assign(planned.parameter, planned.read(_host_memory(planned.parameter)))
        for buffer, stored in self.buffers:
            buffer.copy_(stored.read())
        if self.parts.optimizer is not None:
            self._load_optimizer(self.parts.optimizer)
        self._load_run()
        model_state.call_post_hooks(self.sharded.model)

    def _load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {}
        for own_id, entry in self.states.items():
            # No parameter has two states in memory. Should this fail, the optimizer refuses to step.
            optimizer.state.pop(parameters[own_id], None)
            parameter, values = parameters[own_id], {key: self._value(value) for key, value in entry.items()}
            local_shard = self.sharded.shards[parameter]
            states[own_id] = quantized_state.put_together(optimizer, parameter, local_shard, values)
        optimizer.load_state_dict(optimizer_state.LocalState({"state": states, "param_groups": self.groups}))

    def _value(self, planned: Any) -> Any:
        if isinstance(planned, _ShardRead):
            # Into new memory: an earlier state_dict() of the optimizer keeps the old one.
            return self.sharded.shards.place(planned.parameter, planned.read())
        return planned.read() if isinstance(planned, StoredTensor) else planned

    def _load_run(self) -> None:
        if self.run is None:
            return
        for name, module in model_state.extra_states(self.sharded.model).items():
            module.set_extra_state(self.run["modules"][name])
        for name in ("scheduler", "loader"):
            part = getattr(self.parts, name)
            if part is not None:
                with reraise_as_corrupt(f"{self.folder.path / 'state.json'}: the state of the {name}"):
                    part.load_state_dict(self.run[name])


def _host_memory(tensor: Any) -> torch.Tensor | None:
    """Return what this process holds of a tensor, flat, as the memory itself; None where that is not on the host.

    Memory that the system has yet to hand out takes several times as long to fill, and to be copied from once more.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if type(local) not in (torch.Tensor, nn.Parameter) or local.device.type != "cpu" or local.layout != torch.strided:
        return None
    if not local.is_contiguous() or local.is_conj() or local.is_neg() or local.is_inference():
        return None
    flat: torch.Tensor = local.detach().view(-1)
    return flat


def _planned(sharded: ShardedModel, path: str | PathLike[str], parts: _Parts) -> _LoadPlan:
    """Open a checkpoint and plan to load it.

    Raises:
        CheckpointError: It is not whole, or does not fit.
    """
    folder = CheckpointFolder(path)
    with reraise_as_corrupt(folder.path):
        described = _described(folder, parts)
        tensors = {name: stored.read() for name, stored in folder.state.items()}
        run = _checked_run(sharded, folder, described.get("state.json"), tensors, parts)
        stored = _find_tensors(sharded, folder)
        parameters = [
            _ShardRead(parameter, local_shard, stored, parameter.dtype)
            for parameter, local_shard in sharded.shards.items()
        ]
        own_buffers = model_state.named_buffers(sharded.model)
        buffers = [(buffer, stored[name]) for name, buffer in own_buffers if name in stored]
        plan = _LoadPlan(sharded, folder, parts, parameters, buffers, run=run)
        if parts.optimizer is not None:
            _plan_optimizer(plan, parts.optimizer, json_codec.decode(described["optimizer.json"], tensors))
    return plan


def _find_tensors(sharded: ShardedModel, folder: CheckpointFolder) -> dict[str, StoredTensor]:
    """Find each parameter and persistent buffer of a model in a folder, by its first name in the model.

    Raises:
        CheckpointError: The folder lacks some, holds others, or they have other shapes.
    """
    wanted = ModelTensors(sharded)
    found = find_by_name(wanted, folder)
    is_fitting = not (found.missing or found.unexpected)
    # What torchacc saved is as it was in memory. Elsewhere a name that fits is not enough: transformers may have
    # another layout in mind, and transposes.
    if hf.is_of_transformers(sharded.model) and not (is_fitting and folder.is_verified):
        try:
            found = hf.convert(sharded, wanted, folder)
        except hf.UnknownConversionError as error:
            if not is_fitting:
                raise CheckpointError(f"{found.misfit(wanted, folder)} {error}") from None
            _log.warning("%s is loaded by the names in it. %s", folder.path, error)
    if found.missing or found.unexpected:
        raise CheckpointError(found.misfit(wanted, folder))
    check_tensors(wanted, found.tensors)
    return found.tensors


def _described(folder: CheckpointFolder, parts: _Parts) -> dict[str, Any]:
    """Return what the JSON files say, once they are known to be of what is to be loaded."""
    files = {"optimizer": "optimizer.json", "scheduler": "state.json", "loader": "state.json"}
    asked = [name for name in files if getattr(parts, name) is not None]
    absent = [name for name in asked if not folder.has(files[name])]
    if absent:
        raise CheckpointError(f"{folder.path} holds no state of the {' and the '.join(absent)}: load the model alone")
    wanted = ("state.json",) if parts.optimizer is None else ("state.json", "optimizer.json")
    described = {name: folder.read_json(name) for name in wanted if folder.has(name)}
    run = described.get("state.json", {})
    unsaved = [name for name in asked if name != "optimizer" and run.get(name) is None]
    if unsaved:
        raise CheckpointError(f"{folder.path} was saved without a {' and a '.join(unsaved)}: load it without")
    saved_class = described["optimizer.json"].get("class") if parts.optimizer is not None else None
    if saved_class not in (None, type(parts.optimizer).__name__):  # None: imported, where it is not known
        raise CheckpointError(
            f"{folder.path} was saved with {saved_class}, and this optimizer is {type(parts.optimizer).__name__}: load "
            "the model alone, or make the optimizer that it was saved with"
        )
    saved_class = run.get("scheduler_class") if parts.scheduler is not None else None
    if saved_class not in (None, type(parts.scheduler).__name__):  # None: saved by an earlier version
        raise CheckpointError(
            f"{folder.path} was saved with the scheduler {saved_class}, and this one is "
            f"{type(parts.scheduler).__name__}: load without it, or make the one that it was saved with"
        )
    return described


def _checked_run(
    sharded: ShardedModel, folder: CheckpointFolder, described: Any, tensors: Mapping[str, torch.Tensor], parts: _Parts
) -> Mapping[str, Any] | None:
    """Return what `state.json` says, once it is known that it can be loaded; None where there is none."""
    modules = model_state.extra_states(sharded.model)
    differing = modules.keys() ^ (described or {}).get("modules", {}).keys()
    if differing:
        raise CheckpointError(
            f"{folder.path} and this model differ in what modules keep of their own, by get_extra_state(): "
            f"{', '.join(sorted(differing))}"
        )
    if described is None:
        return None
    path = folder.path / "state.json"
    run: Mapping[str, Any] = json_codec.decode(described, tensors)
    check_random_states(sharded, path, run["random"])
    run["extra"], [run["modules"][name] for name in modules]  # whatever is missing is missed now
    for name in ("scheduler", "loader"):
        part = getattr(parts, name)
        if part is not None:
            check_same_structure(path, name, part.state_dict(), run[name])
    return run


def _plan_optimizer(plan: _LoadPlan, optimizer: torch.optim.Optimizer, described: Mapping[str, Any]) -> None:
    """Plan to load an optimizer's groups and states."""
    for own, saved in zip(optimizer.param_groups, described["groups"], strict=False):
        own = {name: value for name, value in own.items() if name not in ("params", "param_names")}
        check_same_structure(plan.folder.path / "optimizer.json", "optimizer", own, saved)
        _say_what_counts(own, saved)
    names = [group["parameters"] for group in described["groups"]]
    groups = optimizer_state.match_groups(plan.sharded, optimizer, names)
    stored: dict[str, dict[str, StoredTensor]] = {}
    for full_name, tensor in plan.folder.optimizer.items():
        name, _, key = full_name.rpartition("/")
        stored.setdefault(name, {})[key] = tensor
    ids = itertools.count()
    for group, saved in zip(groups, described["groups"], strict=True):
        own_ids = list(itertools.islice(ids, len(group)))
        plan.groups.append({**{k: v for k, v in saved.items() if k != "parameters"}, "params": own_ids})
        for own_id, parameter in zip(own_ids, group, strict=True):
            local_shard = plan.sharded.shards[parameter]
            members = {name: stored.get(name, {}) | described["values"].get(name, {}) for name in local_shard.names}
            entries = optimizer_state.by_state(local_shard, members)
            _check_quantized(plan, optimizer, parameter, entries)
            if entries:
                plan.states[own_id] = {
                    key: _plan_state(parameter, local_shard, key, values) for key, values in entries.items()
                }


def _say_what_counts(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Say of settings of a script's that differ which are those of the checkpoint, as they replace them."""
    for name in _SETTINGS:
        before = [group.get(f"initial_{name}", group.get(name)) for group in (own, saved)]
        if all(isinstance(value, int | float) for value in before) and before[0] != before[1]:
            _log.info(
                "the optimizer's %s goes on as in the checkpoint, from %g, not %g as in the script; set it in "
                "optimizer.param_groups afterwards to change it",
                name,
                before[1],
                before[0],
            )


def _check_quantized(
    plan: _LoadPlan, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, entries: Mapping[str, Any]
) -> None:
    local_shard = plan.sharded.shards[parameter]
    stored = {key: next(iter(values.values())) for key, values in entries.items()}
    shapes = {key: tuple(one.shape) for key, one in stored.items() if isinstance(one, StoredTensor)}
    why = quantized_state.why_it_does_not_fit(optimizer, parameter, local_shard, shapes)
    if why is not None:
        raise CheckpointError(
            f"{plan.folder.path}: the optimizer's state of {local_shard.names[0]!r} is quantized, and cannot be put "
            f"together here: {why}. Load it on as many devices as have saved it, or load the model alone"
        )


def _plan_state(parameter: nn.Parameter, local_shard: LocalShard, key: str, values: Mapping[str, Any]) -> Any:
    """Return how a state of a parameter is read, or its value.

    Args:
        parameter: The parameter.
        local_shard: What this process holds of it.
        key: The state's name.
        values: A `StoredTensor` or a plain value for each of the tensors of the shard, by original name.
    """
    shapes = dict(local_shard.members)
    if all(
        isinstance(v, StoredTensor) and is_for_each_element(key, v.shape, shapes[name]) for name, v in values.items()
    ):
        dtype = functools.reduce(torch.promote_types, (stored.dtype for stored in values.values()))
        return _ShardRead(parameter, local_shard, values, dtype)
    if len(values) == 1:
        return next(iter(values.values()))
    first, *others = [value.read() if isinstance(value, StoredTensor) else value for value in values.values()]
    if any(optimizer_state.differ(first, other) for other in others):
        raise CheckpointError(optimizer_state.flattened_apart(local_shard, f"values of {key!r}"))
    return first
