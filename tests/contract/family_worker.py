"""Train families of models on one engine beside plain PyTorch, and write for each how it went.

    python family_worker.py xla-spmd out/ name …
    python ../forkrun.py 2 family_worker.py native out/ name …

With `plain` for the engine it only says which can be built, and stepped twice, without any.
"""

import copy
import faulthandler
import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from families import Family, all_families, build, loss_of, train
from torch import nn

import torchacc
from torchacc.engines import registry
from torchacc.engines.native import verified_plans
from torchacc.errors import CheckpointError, ConfigError, DataError, EngineError, TrainingError
from torchacc.parallel.tensor_parallel import find_config

ENGINE, OUT, NAMES = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
NUMBERS = ("loss", "norm", "second loss", "second norm")
Errors = dict[str, tuple[float, float]]
"""Name of a number or of a parameter -> its value, or its largest one, and its error."""
RANK = int(os.environ.get("RANK", "0"))
OURS = (CheckpointError, ConfigError, DataError, EngineError, TrainingError)
RELATIVE = 2e-5
GRADIENT = 1e-3
NOISE = 1e-7
"""Of the weights, relative to each: that of rounding to float32."""
STEEP = 1e-2
"""A family whose numbers noise moves by more says nothing."""


def config() -> torchacc.Config:
    if ENGINE == "native-tp":
        return torchacc.Config.from_dict({"backend": "native", "dist": {"tp": {"size": 2}}})
    fsdp = {"size": 2, "use_spmd": ENGINE == "xla-spmd"}
    return torchacc.Config.from_dict({"backend": ENGINE.partition("-")[0], "dist": {"fsdp": fsdp}})


def plain_run(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    def clip(most: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), most)

    return train(model, batch, clip, float)


def set_mode(model: nn.Module, mode: str) -> None:
    model.train(mode == "train")
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # sees the batch of its device


def settle(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[nn.Module, list[float], str]:
    """Put a model into the mode in which two runs of it are the same; return it trained, its numbers, and the mode."""
    for mode in ("train", "eval"):
        set_mode(model, mode)
        found = []
        for _ in range(2):
            trained = copy.deepcopy(model)
            torch.manual_seed(len(found))
            found.append(plain_run(trained, batch))
        if found[0] == found[1]:
            return trained, found[0], mode
    raise RuntimeError("two runs in plain PyTorch are not alike")


def errors(state: dict[str, torch.Tensor], numbers: list[float], plain: nn.Module, expected: list[float]) -> Errors:
    """Return how far a run is from one in plain PyTorch: each number and each parameter, relative to it or to 1."""
    found = {name: (a, abs(a - b) / max(1.0, abs(b))) for name, a, b in zip(NUMBERS, numbers, expected, strict=True)}
    buffers = dict(plain.named_buffers())  # may be statistics of the device's own batch
    for name, b in plain.state_dict().items():
        if name in state and b.is_floating_point() and b.numel() and name not in buffers:
            a = state[name].cpu()
            found[name] = (a.abs().max().item(), (a - b).abs().max().item() / max(1.0, b.abs().max().item()))
    return found


def compare(found: Errors, allowed: Mapping[str, float]) -> str:
    """Return the first thing that is further off than it may be, and than PyTorch itself is allowed."""
    for name, (value, error) in found.items():
        if not error <= max(RELATIVE * (5 if name in NUMBERS else 1), allowed.get(name, 0.0)):
            return f"{name}: {value:.7g} is off by {error:.2g}"
    return ""


def wrong_gradient(model: nn.Module, plain: nn.Module, batch: dict[str, torch.Tensor]) -> str:
    """Return the first parameter whose gradient is further off than rounding, relative to its own largest element.

    A gradient that only some of the processes have may be too small to be seen in the parameters after a step.
    """
    for each in (model, plain):
        loss_of(each, batch).backward()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    off = ""
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if (mine.grad is None) != (theirs.grad is None):
            off = off or f"{name}: one has a gradient, and the other none"
        elif mine.grad is not None:
            a, b = mine.grad.full_tensor(), theirs.grad
            error = (a - b).abs().max().item()
            if not error <= max(GRADIENT * b.abs().max().item(), 1e-7 * largest):
                off = off or f"the gradient of {name}: {b.abs().max().item():.3g} is off by {error:.2g}"
    for each in (model, plain):
        each.zero_grad()
    return off


def steepness(family: Family, mode: str, trained: nn.Module, expected: list[float]) -> dict[str, float]:
    """Return how far plain PyTorch's own run moves when each weight does by as much as float32 rounds it.

    Four times the largest of four runs; where that is large, rounding is no measure of who is right.
    """
    allowed: dict[str, float] = {}
    for seed in range(4):
        model, batch = build(family)
        set_mode(model, mode)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + NOISE * torch.randn(parameter.shape, generator=generator))
        numbers = plain_run(model, batch)
        for name, (_, error) in errors(model.state_dict(), numbers, trained, expected).items():
            allowed[name] = max(allowed.get(name, 0.0), 4 * error)
    return allowed if max(allowed.values()) <= STEEP else {}


def run(family: Family) -> dict[str, str]:
    try:
        model, batch = build(family)
        trained, expected, mode = settle(model, batch)
    except Exception as error:
        return {"outcome": "not built", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    if not all(abs(number) < 1e30 for number in expected):
        return {"outcome": "not built", "reason": f"plain PyTorch comes to {expected}"}
    if ENGINE == "plain":
        return {"outcome": "built", "mode": mode, "parameters": str(sum(p.numel() for p in model.parameters()))}
    plain = copy.deepcopy(model)
    if ENGINE == "native-tp":
        shown = find_config(model)  # whose plan this is to show
        verified_plans.VERIFIED_PLANS[shown.model_type] = verified_plans.fingerprint(shown)
    try:
        torchacc.accelerate(model, None, config())
        engine = registry.active_engine()
        whole = ENGINE in ("xla-spmd", "native-tp")
        mine = {k: engine.to_device(v if whole else v.chunk(2)[RANK]) for k, v in batch.items()}
        wrong = wrong_gradient(model, plain, mine) if ENGINE == "native-tp" else ""
        if wrong:
            return {"outcome": "differs", "reason": wrong, "mode": mode}
        found = train(model, mine, model.clip_grad_norm_, lambda value: float(value.detach().cpu()))
    except OURS as error:
        return {"outcome": "refused", "reason": " ".join(str(error).split()), "mode": mode}
    states = torchacc.full_state_dict(model) or trained.state_dict()  # on the first rank alone
    if set(states) != set(trained.state_dict()):
        names = sorted(set(states) ^ set(trained.state_dict()))
        return {"outcome": "differs", "reason": f"other names: {names[:3]}", "mode": mode}
    off = errors(states, found, trained, expected)
    problem, reason = compare(off, {}), ""
    if problem:
        allowed = steepness(family, mode, trained, expected)
        reason, problem = problem, compare(off, allowed)
        if not problem:
            most = max(allowed.values()) / 4
            reason += f"; so are plain PyTorch's own numbers, by up to {most:.1g}, when each weight moves by {NOISE:g}"
    return {"outcome": "differs" if problem else "agrees", "reason": problem or reason, "mode": mode}


def main() -> None:
    import transformers

    faulthandler.enable((OUT / f"trace-{RANK}").open("a"))  # of what ends the process
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if ENGINE not in ("plain", "native-tp"):  # a layer by itself has no plan
        torch.manual_seed(0)
        torchacc.accelerate(nn.Linear(2, 2), None, config())  # starts the runtime
    families = all_families()
    for name in NAMES:
        print(f"family {name}", flush=True)
        failed = None
        try:
            found = run(families[name])
        except Exception as error:
            failed = traceback.format_exc()
            found = {"outcome": "fails", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            found["traceback"] = failed[-3000:]
        written = OUT / f".{name}.{RANK}"
        written.write_text(json.dumps(found))
        written.rename(OUT / f"{name}.{RANK}.json")
        if failed is not None and ENGINE != "plain":
            os._exit(3)  # what it has left may spoil the next
        if ENGINE not in ("plain", "xla-spmd"):
            torchacc.dist.rendezvous(name)


main()
