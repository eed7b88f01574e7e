"""Save a training run in one layout, and load others that are saved into it, each of which then goes on.

    python checkpoint_worker.py save xla-spmd-2 folder/ [layout to load ...]
    python -m torch.distributed.run --standalone --nproc_per_node=2 checkpoint_worker.py load native-2 folder/ other ...

Saving writes `folder/<layout>/` and `folder/<layout>.json`; loading writes `folder/<saved>.<layout>.json`.
"""

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from layouts import LAYOUTS, Layout
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import torchacc
from tests import gpus

GLOBAL_BATCH = 8
STEPS_BEFORE, STEPS_AFTER = 3, 5
NUM_SAMPLES = 56  # seven steps: the epoch ends after the save
RANK = int(os.environ.get("RANK", "0"))


class Run:
    """A training run with all that a checkpoint has to bring back: groups, ties, frozen weights, numbers, buffers."""

    def __init__(self, layout: Layout) -> None:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                n_layer=1,
                n_embd=36,
                n_head=4,
                n_positions=16,
                vocab_size=131,
                attn_pdrop=0,
                resid_pdrop=0,
                embd_pdrop=0,
            )
        )
        model.register_buffer("count", torch.arange(5))
        model.register_buffer("scale", torch.randn(3))
        model.transformer.h[0].attn.c_proj.weight.requires_grad_(False)
        model.gain = torch.nn.Parameter(torch.tensor(1.25))  # a number, which has no rows to share out
        model.transformer.ln_f.register_forward_hook(lambda module, args, output: output * model.gain)
        samples = torch.randint(0, 131, (NUM_SAMPLES, 12), generator=torch.Generator().manual_seed(1))
        loader = DataLoader(
            [{"input_ids": row, "labels": row} for row in samples],
            batch_size=GLOBAL_BATCH // layout.num_devices,
            shuffle=True,
        )
        config = torchacc.Config.from_dict(layout.config())
        optimizer = self._optimizer(model) if layout.flat else None
        self.model, self.loader, *rest = torchacc.accelerate(model, loader, config, optimizer)
        self.optimizer = rest[0] if rest else self._optimizer(self.model)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    @staticmethod
    def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        decayed = [parameter for parameter in parameters if parameter.dim() > 1]
        others = [parameter for parameter in parameters if parameter.dim() <= 1]
        # The eps keeps gradients that are only rounding from deciding over a whole step; see worker.py.
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=3e-3, eps=1e-4)

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
        }

    def batches(self) -> Iterator[Any]:
        """Return the rest of this epoch and all that follow."""
        while True:
            yield from self.loader

    def train(self, batches: Iterator[Any], count: int) -> list[float]:
        losses = []
        for batch in islice(batches, count):
            self.optimizer.zero_grad()
            loss = self.model(**batch).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def differences(self, folder: Path) -> list[str]:
        """Return the tensors that are not bit for bit those of a checkpoint, as the safetensors library reads it."""
        stored = load_file(folder / "model.safetensors")
        found = torchacc.full_state_dict(self.model)
        of_optimizer = self.model.full_optim_state_dict(self.optimizer, rank0_only=False)
        names = [name for group in of_optimizer["param_groups"] for name in group["param_names"]]
        states = {
            f"{names[i]}/{key}": value for i, entry in of_optimizer["state"].items() for key, value in entry.items()
        }
        stored_states = load_file(folder / "optimizer.safetensors")
        wrong = [name for name in stored if not torch.equal(stored[name], found[name])]
        wrong += [name for name in stored_states if not torch.equal(stored_states[name], states[name])]
        return wrong + sorted(set(states) ^ set(stored_states))


def main() -> None:
    what, name, folder, loads = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
    transformers.logging.set_verbosity_error()
    if gpus.SWITCH in os.environ:
        gpus.join()
    if what == "save":
        run = Run(LAYOUTS[name])
        batches = run.batches()
        run.train(batches, STEPS_BEFORE)
        torchacc.checkpoint.save(folder / name, **run.parts(), extra={"step": STEPS_BEFORE, "by": name})
        write(folder / f"{name}.json", run.train(batches, STEPS_AFTER))
    run = Run(LAYOUTS[name])
    for other in loads:
        extra = torchacc.checkpoint.load(folder / other, **run.parts())
        assert extra == {"step": STEPS_BEFORE, "by": other}
        found = {"differences": run.differences(folder / other), "losses": run.train(run.batches(), STEPS_AFTER)}
        write(folder / f"{other}.{name}.json", found)


def write(path: Path, content: Any) -> None:
    if RANK == 0:
        path.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
