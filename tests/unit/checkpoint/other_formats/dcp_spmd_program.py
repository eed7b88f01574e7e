"""Plain torch_xla under SPMD, without torchacc: save with its planner, and leave the whole state beside it."""

import sys

import torch
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as xc
import torch_xla.runtime as xr
from torch import nn

folder, whole = sys.argv[1:]
xr.use_spmd()
mesh = xs.Mesh(range(4), (4,), ("fsdp",))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 6), nn.Linear(6, 8)).to("xla")
xs.mark_sharding(model[0].weight, mesh, ("fsdp", None))  # 7 rows on 4 devices
xs.mark_sharding(model[2].weight, mesh, ("fsdp", None))
xs.mark_sharding(model[1].weight, mesh, (None, "fsdp"))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.arange(7, device="xla")).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
torch_xla.sync(wait=True)  # torch_xla's planner reads shards, which are there only once their program has run
state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
dcp.save(state, checkpoint_id=folder, planner=xc.SPMDSavePlanner())
names = [name for name, _ in model.named_parameters()]
moments = {
    f"{names[index]}/{key}": value.cpu().contiguous()
    for index, entries in state["optim"]["state"].items()
    for key, value in entries.items()
}
torch.save({"model": {name: tensor.cpu() for name, tensor in state["model"].items()}, "optimizer": moments}, whole)
