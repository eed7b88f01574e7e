"""The three examples of seed 000 as they stand there, then a step with each model, beside an unsharded one.

    python fsdp_script.py
    torchrun --nproc_per_node=2 fsdp_script.py

Rank 0 prints what it finds as JSON.
"""

import copy
import json
import os
import sys

import torch
from torch.nn import functional

import torchacc
from torchacc import fsdp

BASIC = """
import torch.nn as nn

# Define your PyTorch model
model = nn.Sequential(
    nn.Linear(784, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
)

# Wrap the model with FSDP using default settings (no sharding, fp32 precision)
fsdp_model = fsdp(model)
"""

AUTOMATIC = """
import torch.nn as nn


# Define a custom transformer layer type
class TransformerBlock(nn.Module):
    def __init__(self):
        # Define your custom transformer layer here
        pass


# Define your PyTorch model with transformer layers
model = nn.Sequential(
    nn.Linear(784, 256),
    TransformerBlock(),
    nn.Linear(256, 10),
)

# Wrap the model with FSDP and enable automatic layer wrapping
fsdp_model = fsdp(model, auto_wrap=True, TransformerBlock=TransformerBlock)
"""

# The same with a layer that is one.
COMPLETED = AUTOMATIC.replace(
    "        # Define your custom transformer layer here\n        pass\n",
    "        super().__init__()\n        self.linear = nn.Linear(256, 256)\n\n"
    "    def forward(self, x):\n        return x + self.linear(x)\n",
)

ADVANCED = """
import torch.nn as nn

# Define your PyTorch model
model = nn.Sequential(
    nn.Linear(784, 256),
    nn.ReLU(),
    nn.Linear(256, 10),
)

# Wrap the model with FSDP with custom settings (full model sharding, bf16 precision)
fsdp_model = fsdp(model, mp="bf16", shard_strat="FULL_SHARD")
"""


def main() -> None:
    found = {"basic": step(BASIC), "completed": step(COMPLETED), "advanced": step(ADVANCED)}
    run(AUTOMATIC)  # its layer has no forward(), so that there is nothing to compare
    found["inputs"] = inputs()
    if int(os.environ.get("RANK", 0)) == 0:
        sys.stdout.write(json.dumps(found) + "\n")


def run(snippet: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Run a snippet; return the model as it was before fsdp(), and what came back."""
    originals = []

    def watched(model, *args, **kwargs):
        originals.append(copy.deepcopy(model) if "super()" in snippet or "Block" not in snippet else None)
        return fsdp(model, *args, **kwargs)

    torch.manual_seed(0)
    names = {"fsdp": watched}
    exec(snippet, names)
    return originals[0], names["fsdp_model"]


def step(snippet: str) -> dict:
    reference, model = run(snippet)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 784, generator=generator), torch.randint(10, (8,), generator=generator)
    train(reference, x, y)
    num_processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    train(model, *(part.chunk(num_processes)[rank] for part in (x, y)))
    whole = torchacc.full_state_dict(model)
    pairs = [(whole[name], tensor) for name, tensor in reference.state_dict().items()]
    description = torchacc.describe(model)
    return {
        "difference": max(float((a - b).abs().max()) for a, b in pairs),
        "dtypes": sorted({str(a.dtype) for a, _ in pairs}),
        "share": description.num_parameters_per_device / description.num_parameters,
        "num_units": description.num_units,
        "compute_dtype": description.compute_dtype,
    }


class Nested(torch.nn.Module):
    """Takes what a batch may be: a tensor, and a mapping with what is not a tensor beside one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1, bias=False)

    def forward(self, x, *, more):
        self.devices = sorted({str(tensor.device) for tensor in (x, more["y"])})
        return self.linear(x + more["y"]) * more["scale"]


def inputs() -> dict:
    """Call a model with inputs on the CPU, positional, by name and nested, and with one that is there already."""
    reference = Nested()
    model = fsdp(copy.deepcopy(reference), shard_strat="FULL_SHARD")
    device = next(model.parameters()).device
    reference.load_state_dict(torchacc.full_state_dict(model))
    x, y = torch.ones(2, 4), torch.arange(8.0).view(2, 4)
    expected = reference(x, more={"y": y, "scale": 2})
    given = [(x, y), (x.to(device), y)]
    differences = [(model(a, more={"y": b, "scale": 2}).cpu() - expected).abs().max().item() for a, b in given]
    return {"difference": max(differences), "device": str(device), "devices": model.devices}


def train(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        output = model(x).float()
        functional.cross_entropy(output, y.to(output.device)).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
