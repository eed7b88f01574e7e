"""What scripts do with a model, one rule each, for either side of `script_sides.py`.

A program is a list of (name of a rule, two small integers), which a rule reads as it likes. A rule that makes no sense
where it stands, such as a backward without a loss, does nothing on both sides, so that what is left of a program when
hypothesis shrinks it is still one. A rule returns what both sides have to agree on.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from script_sides import Side, next_token_loss
from torch import nn

Call = tuple[str, int, int]
RunRule = Callable[[Side, int, int], Any]
Refusal = Callable[[str, Side, int, int], str | None]


@dataclass(frozen=True)
class Rule:
    """Something that scripts do."""

    run: RunRule
    refusal: Refusal
    """Returns a pattern of the message by which an engine may refuse it here, and that the docs have; None for none."""
    often: int


RULES: dict[str, Rule] = {}


def rule(often: int = 1, refusal: Refusal = lambda *_: None) -> Callable[[RunRule], RunRule]:
    def register(run: RunRule) -> RunRule:
        RULES[run.__name__] = Rule(run, refusal, often)
        return run

    return register


# Refusals. Each is documented: docs/troubleshooting.md has its message.


def without_gradients(engine: str, side: Side, a: int, b: int) -> str | None:
    """Those of a window that no backward has completed are not reduced yet; under XLA a step frees them."""
    freed = "|a step frees the gradients" if engine.startswith("xla") else ""
    window = "accumulat" if side.window_is_open else "$^"
    return window + freed


def norm_by_hand(engine: str, side: Side, a: int, b: int) -> str | None:
    """Of a model in stages `parameter.grad` is that of this one alone: only sums know the others'."""
    return "another stage" if "pp" in (side.axes or {}) else None


# Training


def _loss(side: Side, a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss, and the number that a script prints of it."""
    tokens = side.batch(a)
    if b % 3 == 0 or not side.has_logits(beside_loss=False):
        loss = side.loss(tokens)["loss"]
        return loss, loss.detach()
    logits = side.logits(tokens)
    loss = next_token_loss(logits, tokens) if b % 3 == 1 else logits.square().mean()
    return loss, side.mean(loss)


@rule(often=4)
def forward(side: Side, a: int, b: int) -> Any:
    if len(side.pending) == 2:
        side.pending.clear()
    loss, number = _loss(side, a, b)
    side.pending.append(loss)
    return number


@rule(often=4)
def backward(side: Side, a: int, b: int) -> Any:
    if not side.pending:
        return None
    loss = side.pending.pop(-(a % 2))
    if not loss.requires_grad:
        return False
    if b % 4 == 3:
        loss.backward(retain_graph=True)
    elif b % 4 == 2 and side.pending and side.pending[0].requires_grad:
        loss = loss + side.pending.pop()
    loss.backward()
    side.window_is_open = False
    return True


@rule(often=4)
def train(side: Side, a: int, b: int) -> Any:
    """One step as nearly all scripts have it."""
    if not side.optimizers:
        _make_optimizer(side, 0, 0)
    optimizer = _optimizer(side, b)
    if not side.window_is_open:
        optimizer.zero_grad()
    loss, number = _loss(side, a, b)
    if not loss.requires_grad:
        return number
    loss.backward()
    side.window_is_open = False
    norm = side.clip_of_the_model(1.0, 2.0) if a % 2 else None
    _step(side, optimizer)
    return number, norm


@rule(often=4, refusal=without_gradients)
def step(side: Side, a: int, b: int) -> Any:
    if side.optimizers:
        _step(side, _optimizer(side, a))


def _optimizer(side: Side, index: int) -> torch.optim.Optimizer:
    return side.optimizers[index % len(side.optimizers)]


def _step(side: Side, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    side.pending.clear()  # PyTorch raises in a backward through weights that have changed
    side.after_step(optimizer)


@rule(often=3, refusal=without_gradients)
def zero_grad(side: Side, a: int, b: int) -> Any:
    owner = _optimizer(side, a) if b % 2 and side.optimizers else side.model
    # In a window there may be no gradients yet that could be set to zeros, so that there are none afterwards either.
    owner.zero_grad(set_to_none=b % 4 < 2 or side.window_is_open)
    side.window_is_open = False


@rule()
def drop_gradients_by_hand(side: Side, a: int, b: int) -> Any:
    if side.window_is_open:  # the gradients are not there yet
        return
    for parameter in side.named(a) if b % 2 else side.parameters():
        parameter.grad = None


@rule(often=2)
def accumulate(side: Side, a: int, b: int) -> Any:
    numbers = []
    for index in range(1 + b % 2):
        with side.accumulate():
            loss, number = _loss(side, a + index, b)
            if not loss.requires_grad:
                return numbers
            (loss / 2).backward()
            numbers.append(number)
        side.window_is_open = True
    return numbers


# Clipping


def _norm_by_hand(side: Side, how: int) -> Any:
    gradients = [p.grad for p in side.parameters() if p.grad is not None]
    if how == 0:
        return math.sqrt(sum(g.pow(2).sum().item() for g in gradients))
    if how == 1:
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    if how == 2:
        return sum(g.norm() ** 2 for g in gradients) ** 0.5
    return max(g.abs().max().item() for g in gradients)


@rule(often=3, refusal=without_gradients)
def clip(side: Side, a: int, b: int) -> Any:
    max_norm, norm_type = (0.1, 1.0)[a % 2], (2.0, math.inf, 1.0)[a % 3]
    if b % 3 == 0:
        return side.clip_of_the_model(max_norm, norm_type)
    if b % 3 == 1:
        return side.clip_of_torch(max_norm, norm_type)
    # PyTorch raises where there is none; in a window they are not there yet.
    if not side.window_is_open and any(p.grad is not None for p in side.parameters()):
        nn.utils.clip_grad_value_(side.model.parameters(), 0.01)
    return None


@rule(refusal=norm_by_hand)
def clip_by_hand(side: Side, a: int, b: int) -> Any:
    if side.window_is_open or all(p.grad is None for p in side.parameters()):
        return None
    norm = _norm_by_hand(side, a % 4)
    for parameter in side.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.1 / (float(norm) + 0.1))
    return float(norm)


@rule()
def edit_gradients(side: Side, a: int, b: int) -> Any:
    if side.window_is_open:  # the gradients are not there yet
        return
    for parameter in side.named(b):
        if parameter.grad is None:
            continue
        if a % 3 == 0:
            parameter.grad.mul_(0.5)
        elif a % 3 == 1:
            parameter.grad = parameter.grad * 0.5
        else:
            parameter.grad.zero_()


# Evaluation


@contextmanager
def _evaluating(side: Side, how: int) -> Iterator[None]:
    was_training = side.model.training
    if how % 4 < 2:
        side.model.eval()
    with torch.inference_mode() if how % 4 == 1 else nullcontext() if how % 4 == 3 else torch.no_grad():
        yield
    side.model.train(was_training)


@rule(often=4)
def evaluate(side: Side, a: int, b: int) -> Any:
    """In eval mode or not, with gradients or without, and no backward follows."""
    with _evaluating(side, b):
        output = side.loss(side.batch(a))
        logits = side.rows(output["logits"]) if side.has_logits(beside_loss=True) else None
        return output["loss"].detach(), logits


@rule()
def generate(side: Side, a: int, b: int) -> Any:
    tokens = side.batch(a)
    with _evaluating(side, 0):
        for _ in range(2):
            following = side.logits(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens[:, 1:], following], dim=1)
    return side.rows(tokens)


@rule()
def set_mode(side: Side, a: int, b: int) -> Any:
    side.model.train(bool(a % 2))
    return [module.training for module in side.model.modules()]


# Weights


@rule(often=2)
def freeze(side: Side, a: int, b: int) -> Any:
    _require_gradients(side, b, False)


@rule(often=2)
def unfreeze(side: Side, a: int, b: int) -> Any:
    _require_gradients(side, b, True)


def _require_gradients(side: Side, which: int, wanted: bool) -> None:
    side.pending.clear()
    for parameter in side.named(which):
        parameter.requires_grad_(wanted)


EDITS: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.mul_(0.9),
    lambda p: p.data.mul_(0.9),
    lambda p: p.add_(0.01),
    lambda p: p.copy_(p * 0.5 + 0.1),
    lambda p: nn.init.constant_(p, 0.1),
    lambda p: p.clamp_(-0.5, 0.5),
    lambda p: p.data.copy_(p.data.clone() + 0.01),
]


@rule(often=3)
def edit(side: Side, a: int, b: int) -> Any:
    side.pending.clear()  # PyTorch raises in a backward through weights that have changed
    with torch.no_grad():
        for parameter in side.named(b):
            EDITS[a % len(EDITS)](parameter)


@rule(often=2)
def average_parameters(side: Side, a: int, b: int) -> Any:
    """An EMA of what `parameters()` gives: begun, moved on, and now and then put into the model."""
    with torch.no_grad():
        held = side.averages.setdefault("parameters", [p.detach().clone() for p in side.parameters()])
        for average, parameter in zip(held, side.parameters(), strict=True):
            if b % 2:
                average.lerp_(parameter.detach(), 0.5)
            else:
                average.mul_(0.5).add_(parameter.detach(), alpha=0.5)
        if a % 2:
            side.pending.clear()
            for average, parameter in zip(held, side.parameters(), strict=True):
                parameter.copy_(average)


@rule(often=2)
def average_states(side: Side, a: int, b: int) -> Any:
    """An EMA of whole states."""
    state = side.full_state()
    held = side.averages.setdefault("states", copy.deepcopy(state))
    for name, tensor in state.items():
        held[name].lerp_(tensor, 0.5)
    if a % 2:
        side.pending.clear()
        side.model.load_state_dict(held)
    return held


# Optimizers

OPTIMIZERS: list[Callable[[Any, float], torch.optim.Optimizer]] = [
    lambda parameters, rate: torch.optim.SGD(parameters, lr=0.1 * rate),
    lambda parameters, rate: torch.optim.AdamW(parameters, lr=3e-3 * rate, eps=1e-4, weight_decay=0.1),
    lambda parameters, rate: torch.optim.SGD(parameters, lr=0.05 * rate, momentum=0.9),
    lambda parameters, rate: torch.optim.Adagrad(parameters, lr=0.01 * rate, eps=1e-4),
]
GROUPS: list[Callable[[Side], Any]] = [
    lambda side: side.parameters(),
    lambda side: [p for p in side.parameters() if p.requires_grad],
    lambda side: [
        {"params": [p for p in side.parameters() if p.dim() >= 2]},
        {"params": [p for p in side.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ],
    lambda side: side.named(4),
]


def _make_optimizer(side: Side, a: int, b: int) -> None:
    parameters = GROUPS[b % len(GROUPS)](side)
    if not parameters:
        return
    side.optimizers.append(OPTIMIZERS[a % len(OPTIMIZERS)](parameters, side.rate))
    side.schedulers.append(None)
    del side.optimizers[:-2], side.schedulers[:-2]


@rule(often=3)
def make_optimizer(side: Side, a: int, b: int) -> Any:
    """The first, a second, or one in place of the oldest."""
    _make_optimizer(side, a, b)


@rule()
def add_group(side: Side, a: int, b: int) -> Any:
    if not side.optimizers:
        return None
    optimizer = _optimizer(side, a)
    if isinstance(optimizer, torch.optim.Adagrad):  # PyTorch's own step raises KeyError for such a group
        return None
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [p for p in side.parameters() if id(p) not in held]
    if others:
        optimizer.add_param_group({"params": others, "lr": 0.01 * side.rate})
    return len(others)


@rule(often=2)
def schedule(side: Side, a: int, b: int) -> Any:
    if not side.optimizers:
        return None
    index = a % len(side.optimizers)
    if side.schedulers[index] is None:
        side.schedulers[index] = torch.optim.lr_scheduler.StepLR(side.optimizers[index], 1 + b % 2, gamma=0.5)
    side.schedulers[index].step()
    return [group["lr"] for group in side.optimizers[index].param_groups]


def _structure(side: Side, optimizer: torch.optim.Optimizer) -> Any:
    names = {id(p): name for name, p in side.model.named_parameters()}
    groups = [[names.get(id(p), "?") for p in group["params"]] for group in optimizer.param_groups]
    return type(optimizer).__name__, groups


# Checkpoints


@rule(often=2)
def save(side: Side, a: int, b: int) -> Any:
    optimizer = _optimizer(side, b) if b % 3 and side.optimizers else None
    scheduler = side.schedulers[b % len(side.optimizers)] if b % 3 == 2 and side.optimizers else None
    side.save(a % 2, optimizer, scheduler)
    structure = None if optimizer is None else _structure(side, optimizer)
    side.structures[a % 2] = structure, scheduler is not None
    return structure


@rule(often=3)
def load(side: Side, a: int, b: int) -> Any:
    if a % 2 not in side.saved:
        return None
    structure, has_scheduler = side.structures[a % 2]
    index = next((i for i, each in enumerate(side.optimizers) if _structure(side, each) == structure), None)
    takes_optimizer = index is not None and b % 3 > 0
    optimizer = side.optimizers[index] if takes_optimizer else None
    scheduler = side.schedulers[index] if takes_optimizer and has_scheduler else None
    side.pending.clear()
    side.load(a % 2, optimizer, scheduler)
    return takes_optimizer, scheduler is not None


@rule(often=2)
def keep_state(side: Side, a: int, b: int) -> Any:
    side.averages["kept"] = side.full_state()


@rule(often=2)
def load_kept_state(side: Side, a: int, b: int) -> Any:
    """`load_state_dict()` of a whole state, a part of one, or what `state_dict()` has just given."""
    if "kept" not in side.averages:
        return None
    kept = side.averages["kept"]
    side.pending.clear()
    if b % 3 == 1:
        some = {name: tensor for name, tensor in kept.items() if name.startswith("layers.")}
        return side.model.load_state_dict(some, strict=False).unexpected_keys
    if b % 3 == 2:
        own = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}
        return side.model.load_state_dict(own).missing_keys
    return side.model.load_state_dict(kept).missing_keys


@rule()
def reload_optimizer(side: Side, a: int, b: int) -> Any:
    """An optimizer's state, whole or its own, out and in again."""
    if not side.optimizers:
        return
    optimizer = _optimizer(side, a)
    state = side.full_optimizer_state(optimizer) if b % 2 else optimizer.state_dict()
    optimizer.load_state_dict(state)


# Looks


@rule()
def random_numbers(side: Side, a: int, b: int) -> Any:
    generator_state = torch.get_rng_state()
    number = torch.rand(())
    if side.engine != "plain":  # both sides share the generator
        torch.set_rng_state(generator_state)
    return number


@rule()
def list_names(side: Side, a: int, b: int) -> Any:
    return [
        list(side.model.state_dict()),
        [(name, p.requires_grad) for name, p in side.model.named_parameters()],
        [(name, tuple(buffer.shape)) for name, buffer in side.model.named_buffers()],
        type(side.model).__mro__[-3].__name__,
    ]


@rule(often=2)
def look_at_state(side: Side, a: int, b: int) -> Any:
    return side.full_state()


@rule(often=2)
def look_at_gradients(side: Side, a: int, b: int) -> Any:
    return None if side.window_is_open else side.gradients()


@rule()
def look_at_optimizer(side: Side, a: int, b: int) -> Any:
    if not side.optimizers:
        return None
    state = side.full_optimizer_state(_optimizer(side, a))
    return {key: {n: v for n, v in entries.items() if torch.is_tensor(v)} for key, entries in state["state"].items()}
