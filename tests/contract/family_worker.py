"""Train families of models on one engine beside plain PyTorch, and write for each how it went.

    python family_worker.py xla-spmd out/ name …
    python ../forkrun.py 2 family_worker.py native out/ name …

With `plain` for the engine it only says which can be built, and stepped twice, without any.
"""

import copy
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from families import Family, all_families, build, train
from torch import nn

import torchacc
from torchacc.engines import registry
from torchacc.errors import CheckpointError, ConfigError, DataError, EngineError, TrainingError

ENGINE, OUT, NAMES = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
RANK = int(os.environ.get("RANK", "0"))
OURS = (CheckpointError, ConfigError, DataError, EngineError, TrainingError)
RELATIVE = 2e-5


def config() -> torchacc.Config:
    fsdp = {"size": 2, "use_spmd": ENGINE == "xla-spmd"}
    return torchacc.Config.from_dict({"backend": ENGINE.partition("-")[0], "dist": {"fsdp": fsdp}})


def plain_run(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    def clip(most: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), most)

    return train(model, batch, clip, float)


def settle(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[nn.Module, list[float], str]:
    """Put a model into the mode in which two runs of it are the same; return it trained, its numbers, and the mode."""
    for mode in ("train", "eval"):
        model.train(mode == "train")
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()  # sees the batch of its device
        found = []
        for _ in range(2):
            trained = copy.deepcopy(model)
            torch.manual_seed(len(found))
            found.append(plain_run(trained, batch))
        if found[0] == found[1]:
            return trained, found[0], mode
    raise RuntimeError("two runs in plain PyTorch are not alike")


def compare(model: Any, trained: nn.Module, expected: list[float], found: list[float]) -> str:
    for what, a, b in zip(("loss", "norm", "second loss", "second norm"), found, expected, strict=True):
        if not abs(a - b) <= RELATIVE * 5 * max(1.0, abs(b)):
            return f"{what} {a:.7g} for {b:.7g}"
    states = torchacc.full_state_dict(model)
    plain = trained.state_dict()
    if set(states or plain) != set(plain):
        return f"other names: {sorted(set(states) ^ set(plain))[:3]}"
    buffers = dict(trained.named_buffers())  # may be statistics of the device's own batch
    for name, value in (states or {}).items():
        if value.is_floating_point() and name not in buffers:
            error, size = (value.cpu() - plain[name]).abs().max().item(), plain[name].abs().max().item()
            if not error <= RELATIVE * max(1.0, size):
                return f"{name} is off by {error:.2g} of {size:.2g}"
    return ""


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
    try:
        torchacc.accelerate(model, None, config())
        engine = registry.active_engine()
        mine = {k: engine.put(v if ENGINE == "xla-spmd" else v.chunk(2)[RANK]) for k, v in batch.items()}
        found = train(model, mine, model.clip_grad_norm_, lambda value: float(value.detach().cpu()))
    except OURS as error:
        return {"outcome": "refused", "reason": " ".join(str(error).split()), "mode": mode}
    problem = compare(model, trained, expected, found)
    return {"outcome": "differs" if problem else "agrees", "reason": problem, "mode": mode}


def main() -> None:
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if ENGINE != "plain":
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
