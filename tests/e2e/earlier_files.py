"""Write files as a version does, or load those that an earlier one wrote, and compare them bit for bit.

    python tests/forkrun.py 2 tests/e2e/earlier_files.py write native tests/data/written_by_0_1
    python tests/e2e/earlier_files.py write xla-spmd tests/data/written_by_0_1
    python tests/forkrun.py 2 tests/e2e/earlier_files.py read native tests/data/written_by_0_1

`<folder>/<engine>/` holds what two devices of an engine write: a checkpoint with everything, rank files of the model
and of the optimizer, an optimizer's state in one file; `expected.safetensors` is what all of them hold.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import torchacc
from torchacc.checkpoint import CheckpointManager

RANK = int(os.environ.get("RANK", "0"))
STEPS = 3
FILES = ("native", "xla-multiprocess", "xla-multiprocess-flat", "xla-spmd")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.norm(self.proj(hidden))


class Model(nn.Module):
    """Tied weights, rows that do not divide by two, a frozen weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.randn(11))
        self.register_buffer("count", torch.arange(3))
        self.layers[0].norm.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy((self.head(hidden) + self.bias).flatten(0, 1), ids.roll(1, 1).flatten())


class Run:
    """A model, its optimizer with two groups, and a scheduler on two devices of an engine."""

    def __init__(self, engine: str, seed: int) -> None:
        torch.manual_seed(seed)
        config = torchacc.Config()
        config.backend = engine.partition("-")[0]
        config.dist.fsdp.size = 2
        config.dist.fsdp.wrap_layer_cls = {"Layer"}
        config.dist.fsdp.use_spmd = engine == "xla-spmd"
        config.dist.fsdp.flatten_parameters = engine.endswith("flat")
        model = Model()
        optimizer = self._optimizer(model) if engine.endswith("flat") else None
        accelerated = torchacc.accelerate(model, None, config, optimizer)
        self.model, self.optimizer = accelerated if optimizer else (accelerated, self._optimizer(accelerated))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    @staticmethod
    def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
        norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
        others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
        return torch.optim.AdamW([{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=1e-2)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self) -> None:
        ids = torch.arange(24).reshape(2, 12) % 11
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.model(ids).backward()
            self.optimizer.step()
            self.scheduler.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all that is compared, by name: weights, buffers and the optimizer's state."""
        state = torchacc.optim_state_dict(self.model, self.optimizer)
        names = [name for group in state["param_groups"] for name in group["param_names"]]
        found = {f"model/{name}": tensor.clone() for name, tensor in torchacc.full_state_dict(self.model).items()}
        for index, entry in state["state"].items():
            found |= {f"{names[index]}/{key}": value.clone() for key, value in entry.items()}
        return found

    def differences(self, expected: dict[str, torch.Tensor], what: str) -> list[str]:
        found = {name: tensor for name, tensor in self.tensors().items() if name.startswith(what)}
        wanted = {name: tensor for name, tensor in expected.items() if name.startswith(what)}
        assert wanted
        wrong = sorted(set(found) ^ set(wanted))
        return wrong + [name for name in wanted if name in found and not torch.equal(found[name], wanted[name])]


def write(engine: str, folder: Path) -> None:
    run = Run(engine, seed=0)
    run.train()
    with CheckpointManager(folder / "run", **run.parts()) as manager:
        manager.save(STEPS, extra={"by": engine})
    states = {"model": run.model.state_dict(), "shard_metadata": run.model.get_shard_metadata()}
    torchacc.save(states, str(folder / "ranks"), master_only=False)
    optimizer = {"optimizer": run.optimizer.state_dict(), "shard_metadata": run.model.get_shard_metadata()}
    torchacc.save(optimizer, str(folder / "optimizer-ranks"), master_only=False)
    torchacc.save(run.optimizer.state_dict(), str(folder / "optimizer.pth"))
    expected = run.tensors()
    if RANK == 0:
        save_file(expected, folder / "expected.safetensors")


def read(engine: str, folder: Path) -> None:
    for name in FILES:
        files, expected = folder / name, load_file(folder / name / "expected.safetensors")
        restored = Run(engine, seed=1)
        assert restored.differences(expected, "model/")
        with CheckpointManager(files / "run", **restored.parts()) as manager:
            found = manager.restore()
        assert found is not None
        assert (found.step, found.extra) == (STEPS, {"by": name})
        assert restored.scheduler.last_epoch == STEPS
        assert not restored.differences(expected, ""), name
        if name == engine:
            ranks = Run(engine, seed=2)
            ranks.model.load_state_dict(torchacc.load(str(files / "ranks"))["model"])
            ranks.optimizer.load_state_dict(torchacc.load(str(files / "optimizer-ranks"))["optimizer"])
            assert not ranks.differences(expected, ""), name
        full = Run(engine, seed=3)
        full.model.load_state_dict(torch.load(files / "model.pth", weights_only=True)["model"])
        full.optimizer.load_state_dict(torch.load(files / "optimizer.pth", weights_only=True))
        assert not full.differences(expected, ""), name


if __name__ == "__main__":
    what, engine, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    write(engine, folder / engine) if what == "write" else read(engine, folder)
