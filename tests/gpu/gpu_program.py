"""Run by test_gpu.py in processes of its own: trains a small GPT-2, and writes what can be compared.

python gpu_program.py reference 1 out.json
python gpu_program.py native 1 out.json
python gpu_program.py xla 1|2 out.json
python -m torch.distributed.run --standalone --nproc_per_node=2 gpu_program.py native 2 out.json
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
from models import make_data, make_model

import torchacc
from torchacc.engines import registry
from torchacc.engines.xla import runtime

STEPS = 5
GLOBAL_BATCH = 8


def main() -> None:
    backend, count, out = sys.argv[1:]
    num_gpus = int(count)
    torch.manual_seed(0)
    model = make_model("gpt2", chooses_experts=backend != "xla")
    loader = DataLoader(make_data("gpt2"), GLOBAL_BATCH // num_gpus)
    found = {"device": "cpu", "platform": None}
    if backend != "reference":
        config = torchacc.Config(backend=backend)
        config.dist.fsdp.size = num_gpus
        config.dist.fsdp.use_spmd = backend == "xla" and num_gpus > 1
        config.memory.gpu_fraction = 0.3
        config.memory.gpu_preallocate = False
        model, loader = torchacc.accelerate(model, loader, config)
        found["device"] = str(registry.active_engine().device)
        found["platform"] = runtime.platform() if backend == "xla" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    losses, norms = [], []
    for _, batch in zip(range(STEPS), loader, strict=False):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        losses.append(loss.item())
        norms.append(norm.item())
    if int(os.environ.get("RANK", "0")) == 0:
        Path(out).write_text(json.dumps({**found, "losses": losses, "norms": norms}))


if __name__ == "__main__":
    main()
