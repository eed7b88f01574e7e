"""Save a small model as stock torch_xla does, sharded in several ways; run by `torchrun` with a folder to save into."""

import os
import sys
from pathlib import Path

os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, consolidate_sharded_model_checkpoints

VARIANTS = {
    "flat": {"flatten_parameters": True},
    "separate": {},
    "dim-0": {"shard_param_on_dim_0": True},
    "bf16": {"flatten_parameters": True, "compute_dtype": torch.bfloat16},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.linspace(0, 1, 7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(hidden))


class Model(nn.Module):
    """Tied, with a frozen parameter, and buffers of two dtypes."""

    def __init__(self, width: int = 33, vocabulary: int = 101) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(9))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    options = {"sharding_groups": [list(range(world))], "sharding_rank": rank, "sharding_world_size": world}
    for variant, more in VARIANTS.items():
        (folder / variant).mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        model = Model()
        if variant == "bf16":  # else torch_xla forgets what the buffers were
            model = model.to("xla")
            model.head.weight = model.embedding.weight
        for index, block in enumerate(model.blocks):
            model.blocks[index] = XlaFullyShardedDataParallel(block, **options, **more)
        sharded = XlaFullyShardedDataParallel(model, **options, **more)
        optimizer = train(sharded)
        content = {
            "model": sharded.state_dict(),
            "optimizer": optimizer.state_dict(),
            "shard_metadata": sharded.get_shard_metadata(),
        }
        xm.save(content, folder / variant / f"rank-{rank}-of-{world}.pth", master_only=False)
    dist.barrier()
    if rank == 0:
        for variant in VARIANTS:
            consolidate_sharded_model_checkpoints(f"{folder / variant}/", "rank-*.pth", str(folder / f"{variant}.pth"))
    dist.destroy_process_group()


def train(model: nn.Module) -> torch.optim.Optimizer:
    """Take a step of which every element is the same in any layout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync(wait=True)
    return optimizer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
