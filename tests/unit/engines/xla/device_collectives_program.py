"""Run by test_device_collectives.py in its own process: a layer on one device, and its program on four."""

import json
import os
import re

os.environ |= {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2", "XLA_ALWAYS_ALLREDUCE": "1"}

import torch
import torch_xla
from torch import nn

from torchacc.engines.xla import runtime
from torchacc.engines.xla.collectives import GatheredParameter
from torchacc.engines.xla.device_collectives import DeviceCollectives
from torchacc.engines.xla.gather import Weight, install_unit, weight_numbers
from torchacc.parallel.mesh import Mesh
from torchacc.parallel.sharding import RowLayout


def collectives(dp, fsdp):
    return DeviceCollectives(Mesh((("dp", dp), ("fsdp", fsdp))), rank=0, ordinals=range(dp * fsdp))


def shard_layer(layer, through):
    parameters, numbers = [], weight_numbers(layer)
    for name, parameter in list(layer.named_parameters()):
        rows = RowLayout(tuple(parameter.shape), through.num_shards)
        shard = nn.Parameter(rows.shard(parameter.detach(), through.shard_index).to("xla"))
        layer._parameters[name] = shard
        weight = Weight(name, shard, [(layer, name)], rows.shape, torch.float32, next(numbers))
        parameters.append(GatheredParameter(shard, rows, [weight], is_flat=False))
    install_unit(layer, through.make_gatherer(parameters, reshard_after_forward=True))


def main():
    runtime.start(num_devices=1, spmd=False)  # before any backward on the CPU
    torch.manual_seed(0)
    x, layer, reference = torch.randn(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)
    reference.load_state_dict(layer.state_dict())
    reference(x).square().sum().backward()

    alone = collectives(1, 1)
    shard_layer(layer, alone)
    layer(x.to("xla")).square().sum().backward()
    ones = torch.ones(4, device="xla")
    result = {
        "gradient_error": (layer.weight.grad.cpu() - reference.weight.grad).abs().max().item(),
        "average": alone.average(ones).cpu().tolist(),
        "norm": alone.combine_norms(ones, 2.0).cpu().item(),
        "largest": alone.combine_norms(2 * ones, float("inf")).cpu().item(),
    }

    layer = nn.Linear(6, 3)  # 3 rows over 2 shards: the second is padded
    shard_layer(layer, collectives(2, 2))
    layer(x.to("xla")).square().sum().backward()
    program = torch_xla._XLAC._get_xla_tensors_hlo([layer.weight.grad])
    calls = re.findall(
        r"= \(?(\S+?)\{.*? (all-gather|reduce-scatter|all-reduce)\(.*?replica_groups=(\{\{.*?\}\})", program
    )
    result["calls"] = [call for call in calls if call[2] != "{{0}}"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
