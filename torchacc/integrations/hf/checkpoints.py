"""The folders `checkpoint-N` of a run: a torchacc checkpoint each, or, of a model with adapters, what is trained."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, _is_peft_model, sort_checkpoints

from torchacc import api, checkpoint
from torchacc.checkpoint import model_state
from torchacc.checkpoint.own_format.manifest import MANIFEST
from torchacc.checkpoint.own_format.removal import recover_interrupted
from torchacc.checkpoint.run_state import random_state, set_random_state
from torchacc.engines.sharded_model import sharded_model
from torchacc.errors import CheckpointError
from torchacc.logging import get_logger

_log = get_logger(__name__)

_ADAPTERS_RUN = "training_state.pt"
_TRAINER_STATE = "trainer_state.json"
_STATES = ("optimizer", "scheduler", "loader")


@dataclass(frozen=True)
class Run:
    """What a checkpoint is of; None is left out."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    loader: Any = None


def save(folder: Path, run: Run, *, tokenizer: Any, extra: Any) -> None:
    """Save a run. Collective: every process."""
    if _is_peft_model(run.model):
        _save_adapters(folder, run, tokenizer, extra)
    else:
        checkpoint.save(folder, **vars(run), tokenizer=tokenizer, extra=extra)


def load(folder: Path, run: Run) -> Any:
    """Load a run, which may have been saved at another number of devices. Collective: every process.

    Returns:
        What was saved as `extra`.
    """
    if _is_peft_model(run.model):
        return _load_adapters(folder, run)
    return checkpoint.load(folder, **vars(run))


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return on rank 0 the weights that `save_pretrained()` writes, or those of adapters. Collective: every process."""
    # peft asks parts of the model for their names, on rank 0: natively that shards units again which an evaluation has
    # left unsharded, and the other ranks have to do the same: else rank 0 alone would gather them in the next forward.
    model.state_dict()
    if not _is_peft_model(model):
        return api.full_state_dict(model, rank0_only=True)
    sharded = sharded_model(model)
    adapters: set[str] = set(model.peft_config)  # type: ignore[arg-type]
    weights: dict[str, torch.Tensor] = {}
    for parameter, local_shard in sharded.shards.items():
        if parameter.requires_grad or any(adapters.intersection(name.split(".")) for name in local_shard.names):
            weights |= model_state.gathered(sharded, local_shard, parameter, rank0_only=True)
    return weights


def newest(output_dir: Path) -> Path:
    """Return the newest checkpoint of a run that is complete. One process, while none saves.

    Raises:
        CheckpointError: There is none.
    """
    for leftover in output_dir.glob(f".{PREFIX_CHECKPOINT_DIR}-*"):
        recover_interrupted(output_dir / leftover.name.split(".")[1])
    torn = []
    for folder in map(Path, reversed(sort_checkpoints(str(output_dir)))):
        reason = _why_torn(folder)
        if reason is None:
            return folder
        _log.warning("%s is not resumed: %s", folder, reason)
        torn.append(folder.name)
    found = f"only {', '.join(torn)}, which are not complete" if torn else "none"
    raise CheckpointError(
        f"resume_from_checkpoint=True looks for a checkpoint in {output_dir}, and there is {found}: leave it out to "
        "start anew"
    )


def check(folder: Path) -> None:
    """Refuse a folder that no run of this Trainer has saved completely.

    Raises:
        CheckpointError: It is one.
    """
    reason = _why_torn(folder)
    if reason is not None:
        raise CheckpointError(
            f"{folder} cannot be resumed: {reason}. To start from its weights, open it with from_pretrained()"
        )


def _why_torn(folder: Path) -> str | None:
    if not any((folder / name).is_file() for name in (MANIFEST, _ADAPTERS_RUN)):
        return f"it has no {MANIFEST} and no {_ADAPTERS_RUN}, so that it is not complete, or not saved by torchacc"
    try:
        json.loads((folder / _TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"its {_TRAINER_STATE} is missing or cut short"
    return None


def _save_adapters(folder: Path, run: Run, tokenizer: Any, extra: Any) -> None:
    sharded = sharded_model(run.model)
    engine = sharded.engine
    drawn = random_state(sharded)  # comes first: to fetch tensors moves XLA's seed
    draws = engine.group.all_gather_objects(drawn)
    weights = full_weights(run.model)
    on_rank0 = model_state.FullStateDictConfig(rank0_only=True)
    optimizer = None if run.optimizer is None else api.optim_state_dict(run.model, run.optimizer, config=on_rank0)

    def write() -> None:
        if engine.job.rank:
            return
        model: Any = run.model
        model.save_pretrained(folder, state_dict=weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        parts = {name: getattr(run, name) for name in _STATES[1:]}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        incomplete = folder / f".{_ADAPTERS_RUN}"
        torch.save({"weights": weights, "optimizer": optimizer, **states, "random": draws, "extra": extra}, incomplete)
        incomplete.rename(folder / _ADAPTERS_RUN)

    engine.group.call_on_all(write)
    engine.set_random_state(drawn)


def _load_adapters(folder: Path, run: Run) -> Any:
    sharded = sharded_model(run.model)

    def read() -> Mapping[str, Any]:
        with safe_globals():
            saved: Mapping[str, Any] = torch.load(folder / _ADAPTERS_RUN, map_location="cpu", weights_only=True)
        absent = [
            name for name, part in vars(run).items() if name != "model" and part is not None and not saved.get(name)
        ]
        if absent:
            raise CheckpointError(f"{folder} holds no state of the {' and the '.join(absent)}")
        if unexpected := sharded.model.load_state_dict(saved["weights"], strict=False).unexpected_keys:
            raise CheckpointError(f"{folder} has {', '.join(unexpected[:8])}, which this model's adapters do not")
        for name in _STATES:
            if getattr(run, name) is not None:
                getattr(run, name).load_state_dict(saved[name])
        return saved

    saved = sharded.engine.group.call_on_all(read)
    sharded.engine.sync()
    set_random_state(sharded, saved["random"])
    return saved["extra"]
