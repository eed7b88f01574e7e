"""Training runs of the contract: each model with each variant, and in plain PyTorch what these are compared with.

The latter is in float32, unsharded, and concatenates the batches of all devices. It has a launch of its own, as XLA
cannot start where autograd already has.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import transformers
from casekit import ENGINE, NUM_DEVICES, RANK, Case, add_case
from matrix import VARIANTS, TrainingCase, all_references
from models import FROZEN, MODELS, NUM_SAMPLES, make_data, make_model
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate

import torchacc

GLOBAL_BATCH = 8
EPOCHS = 2

# Adam divides a gradient by its own size: where a gradient is as small as the rounding of its sums, two right answers
# differ by as much as the learning rate. With an eps above that size an error stays as small as it was, while most
# gradients of these models are far larger.
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-4}
ADAMW_MAX_NORM = 0.1  # below all gradient norms of these models
SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
SGD_MAX_NORM = 1e6  # measures, and clips nothing
SCALE = 2.0**10  # of float16; small enough to overflow nowhere, as a step that is skipped would say little

Batch = dict[str, torch.Tensor]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train, and return what can be compared.

    Args:
        case: `id`, `model`, `recipe` (a key of `RECIPES`), `config` (or None), `num_devices` (those that see different
            data), and `options`, names of what else is to be done: `handed-in`, `deferred`, `unequal-seeds`,
            `unequal-shapes`, `evaluate`, `ragged`, and for the reference also `per-device`, and `autocast-` with a
            dtype.
    """
    transformers.logging.set_verbosity_error()
    options = case["options"]
    is_reference = case["config"] is None
    torch.manual_seed(RANK if "unequal-seeds" in options else 0)
    engine = "" if is_reference else case["config"]["backend"]
    other = "unequal-shapes" in options and RANK > 0
    name = "llama" if other else case["model"]
    if "deferred" in options:
        model = torchacc.deferred_init(make_model, name, chooses_experts=engine != "xla")
    else:
        model = make_model(name, chooses_experts=engine != "xla")
    data = make_data(case["model"], ragged="ragged" in options)
    recipe = RECIPES[case["recipe"]]
    recipe.freeze(model, case["model"])
    found: dict[str, Any] = {
        "before": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "names": names_of(model),
        "frozen": [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad],
        "class": type(model).__name__,
    }

    optimizer = recipe.make_optimizer(model) if "handed-in" in options else None
    if is_reference:
        num_parts = case["num_devices"] if "per-device" in options else 1
        lowered = next((option.partition("-")[2] for option in options if option.startswith("autocast-")), None)
        training: Training = Reference(model, data, case["num_devices"], num_parts, lowered)
    else:
        training = Sharded(model, data, case, optimizer)
        found["names_after"] = names_of(model)
        found["classes_after"] = [ancestor.__name__ for ancestor in type(model).__mro__]
        found["config_class"] = type(getattr(model, "config", None)).__name__
        found["experts"] = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if optimizer is None:
        optimizer = recipe.make_optimizer(model)

    found["num_compiles"] = []
    found |= train(training, optimizer, recipe, found["num_compiles"], evaluate="evaluate" in options)
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    found |= {
        "recipe": case["recipe"],
        "max_norm": recipe.max_norm,
        "output_dtypes": training.output_dtypes,
        "state": training.state(),
        "group_sizes": [[len(group["params"]), group["weight_decay"]] for group in optimizer.param_groups],
        "optimizer_holds_strangers": any(id(parameter) not in own for parameter in held),
        "num_elements_held": sum(shard_of(parameter).numel() for parameter in model.parameters()),
        "dtypes": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "state_dtypes": sorted({str(v.dtype) for s in optimizer.state.values() for v in s.values() if v.dim()}),
    }
    if not is_reference:
        found["description"] = asdict(torchacc.describe(model))
        found |= joined(found)
    return found


def names_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's names; those of one parameter are a group."""
    groups = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return {
        "parameters": [*groups.values()],
        "unique": [name for name, _ in model.named_parameters()],
        "state_dict": list(model.state_dict()),
    }


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a parameter; under SPMD that is all of it, on all devices together."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


class AdamW:
    """AdamW with two groups, made by name and number of dimensions, and clipping that bites at each step."""

    max_norm = ADAMW_MAX_NORM
    micro_batches = 1
    epochs = 1

    def freeze(self, model: nn.Module, name: str) -> None:
        pass

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        decays = {name for name, p in model.named_parameters() if p.ndim >= 2 and "norm" not in name}
        groups = [
            {"params": [p for name, p in model.named_parameters() if name in decays], "weight_decay": 0.1},
            {"params": [p for name, p in model.named_parameters() if name not in decays], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, **ADAMW)


class SgdFrozenAccumulated:
    """SGD with momentum, which is linear in the gradients, a frozen part, and two micro-batches for each step."""

    max_norm = SGD_MAX_NORM
    micro_batches = 2
    epochs = EPOCHS

    def freeze(self, model: nn.Module, name: str) -> None:
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(not parameter_name.startswith(FROZEN[name]))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **SGD)


RECIPES = {"adamw": AdamW(), "sgd": SgdFrozenAccumulated()}


class Training:
    """A model in training, sharded or not."""

    model: nn.Module
    scaler: torch.amp.GradScaler
    output_dtypes: dict[str, str]

    def batches(self) -> Iterator[Batch]:
        """Return the batches of the next epoch."""
        raise NotImplementedError

    def held_out(self) -> Iterator[Batch]:
        """Return batches in a fixed order."""
        raise NotImplementedError

    def loss(self, batch: Batch) -> torch.Tensor:
        if "images" in batch:
            logits = self.model(batch["images"])
            loss = F.cross_entropy(logits, batch["labels"])
        else:
            output = self.model(**batch)
            loss, logits = output.loss, output.logits
        self.output_dtypes = {"loss": str(loss.dtype), "logits": str(logits.dtype)}
        return loss

    def backward(self, batch: Batch, share: float) -> torch.Tensor:
        loss = self.loss(batch)
        self.scaler.scale(loss * share).backward()
        return loss.detach()


class Reference(Training):
    def __init__(
        self, model: nn.Module, data: list[Batch], num_devices: int, num_parts: int, lowered: str | None
    ) -> None:
        self.model = model
        self.clip = lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        self.accumulate: Callable[[], AbstractContextManager[None]] = nullcontext
        self._loaders = [DataLoader(data, GLOBAL_BATCH // num_devices, shuffle=shuffle) for shuffle in (True, False)]
        self._num_parts = num_parts
        self._autocast = torch.autocast("cpu", getattr(torch, lowered)) if lowered else nullcontext()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=lowered == "float16")

    def batches(self) -> Iterator[Batch]:
        return _global_batches(self._loaders[0])

    def held_out(self) -> Iterator[Batch]:
        return _global_batches(self._loaders[1])

    def loss(self, batch: Batch) -> torch.Tensor:
        with self._autocast:
            return super().loss(batch)

    def backward(self, batch: Batch, share: float) -> torch.Tensor:
        """Go through the devices' parts of the batch apart, where what they compute does not add up to the whole."""
        parts = [{k: v.chunk(self._num_parts)[i] for k, v in batch.items()} for i in range(self._num_parts)]
        return sum(super(Reference, self).backward(part, share / len(parts)) for part in parts) / len(parts)

    def state(self) -> Batch:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def num_compiles(self) -> int:
        return 0


def _global_batches(loader: DataLoader) -> Iterator[Batch]:
    """Join the devices' batches, and complete the last global one from the start of the epoch's order."""
    epoch = list(loader)
    whole = {key: torch.cat([batch[key] for batch in epoch]) for key in epoch[0]}
    for start in range(0, NUM_SAMPLES, GLOBAL_BATCH):
        rows = torch.arange(start, start + GLOBAL_BATCH) % NUM_SAMPLES
        yield {key: tensor[rows] for key, tensor in whole.items()}


class Sharded(Training):
    def __init__(
        self, model: nn.Module, data: list[Batch], case: dict[str, Any], optimizer: torch.optim.Optimizer | None
    ) -> None:
        config = torchacc.Config.from_dict(case["config"])
        loader = DataLoader(data, GLOBAL_BATCH // case["num_devices"], shuffle=True, collate_fn=default_collate)
        returned = torchacc.accelerate(model, loader, config, optimizer)
        assert returned[0] is model
        assert optimizer is None or returned[2] is optimizer
        self.model, self._loader = returned[:2]
        self._held_out = torchacc.shard_loader(DataLoader(data, GLOBAL_BATCH // case["num_devices"]), model)
        self.scaler = torchacc.GradScaler(model, init_scale=SCALE)
        self.clip = model.clip_grad_norm_
        self.accumulate = lambda: torchacc.accumulate(model)

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def held_out(self) -> Iterator[Batch]:
        return iter(self._held_out)

    def state(self) -> Batch:
        return torchacc.full_state_dict(self.model)

    def num_compiles(self) -> int:
        return torchacc.compile_report().graphs


def train(
    training: Training, optimizer: torch.optim.Optimizer, recipe: Any, num_compiles: list[int], *, evaluate: bool
) -> dict[str, Any]:
    """Train for the recipe's epochs; values are looked at after each step, when they are there."""
    losses, norms, held_out = [], [], []
    training.model.train()
    for _ in range(recipe.epochs):
        window: list[torch.Tensor] = []
        for batch in training.batches():
            last = len(window) == recipe.micro_batches - 1
            with nullcontext() if last else training.accumulate():
                window.append(training.backward(batch, 1 / recipe.micro_batches))
            if last:
                training.scaler.unscale_(optimizer)
                norm = training.clip(recipe.max_norm)
                training.scaler.step(optimizer)
                training.scaler.update()
                optimizer.zero_grad()
                losses.append(float(sum(map(float, window)) / len(window)))
                norms.append(float(norm))
                num_compiles.append(training.num_compiles())
                window = []
            if evaluate and len(losses) in (1, 3):
                held_out += evaluated(training)
    return {"losses": losses, "norms": norms, "held_out_losses": held_out}


@torch.no_grad()
def evaluated(training: Training) -> list[float]:
    training.model.eval()
    losses = [float(training.loss(batch)) for batch in training.held_out()]
    training.model.train()
    return losses


def joined(found: dict[str, Any]) -> dict[str, Any]:
    """Put together what each process has seen. A loss that the script computed itself is the process's own."""
    mine = {key: found[key] for key in ("losses", "norms", "held_out_losses")}
    payloads = torchacc.dist.rendezvous("results", json.dumps(mine).encode())
    by_rank = [json.loads(payload) for payload in payloads]
    mean = {
        key: [sum(values) / len(values) for values in zip(*(other[key] for other in by_rank), strict=True)]
        for key in mine
    }
    return mean | {"losses_by_rank": [other["losses"] for other in by_rank]}


def train_model(model: str, variant: str) -> dict[str, Any] | None:
    """Return what `run()` does, or `refused`; None on other ranks than the first."""
    try:
        found = run(TrainingCase(f"{ENGINE}-{NUM_DEVICES}", model, variant).as_input())
    except torchacc.ConfigError as error:
        found = {"refused": str(error)}
    return found if RANK == 0 else None


for each in (TrainingCase("-0", model, variant) for model in MODELS for variant in VARIANTS):
    add_case(each.name, Case(partial(train_model, each.model, each.variant), ()))
for reference in all_references(MODELS):
    add_case(reference["id"], Case(partial(run, reference), ()))
