"""Watch what XLA compiles, and log what has changed where it compiles again.

A training step is one program, compiled at an optimizer's first step, and where its state cannot be made before, at the
second. What is compiled after these two is a surprise, unless a model runs for the first time in another mode, as in an
evaluation, or with one of the lengths of `config.dataloader`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from torchacc.engines.compile_report import WARM_UP_STEPS, CompileReport
from torchacc.engines.xla import runtime
from torchacc.logging import OF_THIS_RANK, get_logger

_log = get_logger(__name__)

_UNKNOWN = (
    "nothing that torchacc sees has changed: a number or shape in the script, or a tensor's value that was asked for; "
    "PT_XLA_DEBUG_LEVEL=2 names the line"
)

Inputs = dict[str, str]
"""What a forward was called with: argument -> dtype and shape of a tensor, or another value as text."""


class CompileWatch:
    """Tracks what the programs of this process depend on, as far as torchacc knows."""

    def __init__(self) -> None:
        self._forwards: WeakKeyDictionary[nn.Module, dict[str, list[Inputs]]] = WeakKeyDictionary()
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._evaluated: WeakSet[nn.Module] = WeakSet()
        """Models that have run without gradients since a first step."""
        self._gradients: WeakKeyDictionary[torch.optim.Optimizer, frozenset[str]] = WeakKeyDictionary()
        self._settings: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, str]]] = WeakKeyDictionary()
        self._expected: list[str] = []
        self._changes: list[str] = []
        self._graphs = 0
        self._secs = 0.0
        self._warned = False
        self._notes: dict[str, None] = {}
        self._recompiles: list[str] = []

    def report(self) -> CompileReport:
        """Return what has been compiled so far."""
        graphs, secs = runtime.compile_stats()
        return CompileReport(
            graphs=graphs,
            secs=secs,
            cache_hits=runtime.count("CachedCompile"),
            persistent_cache_hits=runtime.count("PersistentCacheHit"),
            notes=tuple(self._notes),
            recompiles=tuple(self._recompiles),
        )

    def note(self, text: str) -> None:
        """Record why something compiles more than once."""
        self._notes[text] = None

    def on_forward(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], *, num_lengths: int) -> None:
        """Record the inputs that a model is called with.

        Args:
            model: The model.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            num_lengths: How many lengths its batches may have.
        """
        mode = (
            f"{'training' if model.training else 'eval'} mode, gradients {'on' if torch.is_grad_enabled() else 'off'}"
        )
        known = self._forwards.setdefault(model, {}).setdefault(mode, [])
        inputs = _describe(args, kwargs)
        if len(self._steps) and not torch.is_grad_enabled() and model not in self._evaluated:
            # One that ran so before training, as to look at its loss, had another program then.
            self._evaluated.add(model)
            self._expected.append(f"{type(model).__name__} ran in {mode} for the first time since its training began")
            known.append(inputs)
        if inputs in known:
            return
        name = type(model).__name__
        if not known:
            self._expected.append(f"{name} ran in {mode} for the first time")
        else:
            target = self._expected if len(known) < num_lengths else self._changes
            target.append(f"{name} was called with {_difference(inputs, known)}")
        known.append(inputs)

    def before_step(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        """Record what an optimizer's step depends on.

        Args:
            optimizer: The optimizer.
            names: Names of a model's parameters.
        """
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = frozenset(names[p] for p in held if p.grad is not None and p in names)
        changed = sorted(gradients ^ self._gradients.get(optimizer, gradients))
        self._gradients[optimizer] = gradients
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._changes.append(f"{'a' if changed[0] in gradients else 'no'} gradient for {changed[0]}{more}")
        settings = [
            {key: _describe_value(group[key]) for key in _settings_of(optimizer, group)}
            for group in optimizer.param_groups
        ]
        self._changes += _changed(self._settings.get(optimizer, settings), settings)
        self._settings[optimizer] = settings

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what was compiled since the last step of any optimizer; warn at the first unexpected compile."""
        step = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        graphs, secs = runtime.compile_stats()
        compiled, took = graphs - self._graphs, secs - self._secs
        self._graphs, self._secs = graphs, secs
        expected, changes = self._expected, self._changes
        self._expected, self._changes = [], []
        if not compiled or step <= WARM_UP_STEPS:
            return
        why = "; ".join(changes or expected or [_UNKNOWN])
        count = "a program" if compiled == 1 else f"{compiled} programs"
        self._recompiles.append(f"{count} in {took:.1f} s, up to step {step} of {type(optimizer).__name__}: {why}")
        if not self._warned and not (expected and not changes):
            self._warned = True
            _log.warning(
                "compiled anew: %s. Later ones are listed by torchacc.compile_report(); batches of many lengths are "
                "padded to a few by config.dataloader.buckets",
                self._recompiles[-1],
                extra=OF_THIS_RANK,
            )


def _describe(args: Any, kwargs: Mapping[str, Any]) -> Inputs:
    leaves = [*tree_leaves_with_path(dict(kwargs)), *tree_leaves_with_path(tuple(args))]
    return {keystr(path): _describe_value(value) for path, value in leaves}


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | tuple) or value is None else type(value).__name__


def _difference(inputs: Inputs, known: Sequence[Inputs]) -> str:
    """Return how inputs differ from the nearest known ones."""

    def differing(other: Inputs) -> list[str]:
        return sorted(key for key in inputs.keys() | other.keys() if inputs.get(key) != other.get(key))

    nearest = min(known, key=lambda other: len(differing(other)))
    return ", ".join(
        f"argument {key} = {inputs.get(key, 'nothing')} in place of {nearest.get(key, 'nothing')}"
        for key in differing(nearest)
    )


def _settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Iterator[str]:
    """Return the settings of a group that are part of the program; of PyTorch's own the learning rate is an input."""
    own = type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)
    return (key for key in group if key != "params" and not (own and key == "lr"))


def _changed(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        for key in new:
            if old.get(key) != new[key]:
                yield f"{key} of the optimizer's group {index} went from {old.get(key)} to {new[key]}"
