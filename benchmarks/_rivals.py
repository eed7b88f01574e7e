"""How others train the workload of `step_time.py`, each as its own documentation has it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _cases import GLOBAL_BATCH, Case
from _training import (
    CannotRunError,
    Steps,
    batches,
    make_model,
    make_optimizer,
    make_samples,
    share_cores,
    train,
    train_by_hand,
)
from torch import nn
from torch.utils.data import DataLoader


def _eager(case: Case, tokens: torch.Tensor) -> Steps:
    model = make_model(case.layers)
    return train(model, make_optimizer(model), batches(tokens))


def _compiled(case: Case, tokens: torch.Tensor) -> Steps:
    model = make_model(case.layers)
    return train(torch.compile(model), make_optimizer(model), batches(tokens))


def _ddp(case: Case, tokens: torch.Tensor) -> Steps:
    """PyTorch's data parallelism: nothing is sharded."""
    dist.init_process_group("gloo")
    share_cores(case.processes)
    model = nn.parallel.DistributedDataParallel(make_model(case.layers))
    return train(model, make_optimizer(model), batches(tokens, dist.get_rank(), case.processes))


def _fsdp2(case: Case, tokens: torch.Tensor) -> Steps:
    """FSDP2 as its tutorial has it: each block and the root, each process with its share of the cores."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    share_cores(case.processes)
    model = make_model(case.layers)
    if case.kind == "fsdp2-compile":  # as torchtitan does: each block before it is sharded, and the loss
        for block in model.transformer.h:
            block.compile()
        model.loss_function = torch.compile(model.loss_function)
    model = _fully_shard(model, init_device_mesh("cpu", (case.processes,)))
    return train(model, make_optimizer(model), batches(tokens, dist.get_rank(), case.processes))


def _accelerate(case: Case, tokens: torch.Tensor) -> Steps:
    """Hugging Face Accelerate's FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
    )
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), fsdp_plugin=plugin)
    if not accelerator.is_fsdp2:
        kind = accelerator.distributed_type.value
        raise CannotRunError(f"Accelerate drops its FSDP plugin on this device without a word, and trains as {kind}")
    return _accelerated(accelerator, case, tokens)


def _accelerate_ddp(case: Case, tokens: torch.Tensor) -> Steps:
    """Hugging Face Accelerate's data parallelism."""
    from accelerate import Accelerator

    return _accelerated(Accelerator(cpu=not torch.accelerator.is_available()), case, tokens)


def _fabric(case: Case, tokens: torch.Tensor) -> Steps:
    """Lightning Fabric's FSDP2."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import ModelParallelStrategy

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        return _fully_shard(model, mesh["data_parallel"])

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=case.processes, tensor_parallel_size=1)
    fabric = Fabric(devices=case.processes, strategy=strategy, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    share_cores(case.processes)
    model = fabric.setup_module(make_model(case.layers))
    optimizer = fabric.setup_optimizers(make_optimizer(model))
    loader = fabric.setup_dataloaders(_loader(case, tokens))
    return train(model, optimizer, loader, fabric.backward)


def _torch_xla(case: Case, tokens: torch.Tensor) -> Steps:
    """One XLA device by hand: weights tied again after the move, no gradient alive when the step runs."""
    import torch_xla

    device = torch_xla.device()
    model = make_model(case.layers).to(device)
    model.tie_weights()
    return train_by_hand(model, make_optimizer(model), batches(tokens), lambda tensor: tensor.to(device))


def _xla_fsdp(case: Case, tokens: torch.Tensor) -> Steps:
    """torch_xla's FSDP, one process for each device."""
    import torch_xla
    import torch_xla.runtime as xr
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    device = torch_xla.device()
    if xr.world_size() != case.processes:
        raise CannotRunError(
            f"each of the {case.processes} processes that torchrun started believes to be alone (world_size() is "
            f"{xr.world_size()}): XLA's client of this device knows one process, so that each would train by itself"
        )
    model = make_model(case.layers).to(device)
    model.tie_weights()
    for index, block in enumerate(model.transformer.h):
        model.transformer.h[index] = XlaFullyShardedDataParallel(block)
    model = XlaFullyShardedDataParallel(model)
    own = batches(tokens, xr.global_ordinal(), case.processes)
    return train_by_hand(model, make_optimizer(model), own, lambda tensor: tensor.to(device))


def _fsdp_v2(case: Case, tokens: torch.Tensor) -> Steps:
    """torch_xla's FSDPv2 class, one process for all devices."""
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(case.devices), (case.devices,), ("fsdp",))
    model = make_model(case.layers).to(torch_xla.device())
    model.tie_weights()
    wrapped = wrap_fsdp_v2(model, mesh)

    def put(tensor: torch.Tensor) -> torch.Tensor:
        on_device = tensor.to(torch_xla.device())
        xs.mark_sharding(on_device, mesh, ("fsdp", None))
        return on_device

    return train_by_hand(wrapped, make_optimizer(wrapped), batches(tokens), put)


def wrap_fsdp_v2(model: Any, mesh: Any) -> Any:
    """Put torch_xla's FSDPv2 class around each block of a GPT-2 and around the model.

    Args:
        model: On the device, its weights tied.
        mesh: With one axis, `fsdp`.
    """
    import torch_xla.distributed.spmd as xs
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    def shard_output(output: Any, mesh: Any) -> None:
        tensor = output if isinstance(output, torch.Tensor) else next(iter(output.values()))
        if tensor.dim():
            xs.mark_sharding(tensor, mesh, ("fsdp", *[None] * (tensor.dim() - 1)))

    def wrap(module: nn.Module) -> Any:
        return SpmdFullyShardedDataParallel(module, mesh=mesh, shard_output=shard_output)

    for index, block in enumerate(model.transformer.h):
        model.transformer.h[index] = wrap(block)
    return wrap(model)


BUILDERS: dict[str, Callable[[Case, torch.Tensor], Steps]] = {
    "eager": _eager,
    "compile": _compiled,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "fsdp2-compile": _fsdp2,
    "accelerate": _accelerate,
    "accelerate-ddp": _accelerate_ddp,
    "fabric": _fabric,
    "torch_xla": _torch_xla,
    "xla-fsdp": _xla_fsdp,
    "fsdpv2": _fsdp_v2,
}
"""By the kind of a case."""


def _fully_shard(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _accelerated(accelerator: Any, case: Case, tokens: torch.Tensor) -> Steps:
    share_cores(case.processes)
    model = make_model(case.layers)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), _loader(case, tokens))
    return train(model, optimizer, loader, accelerator.backward)


def _loader(case: Case, tokens: torch.Tensor) -> DataLoader[Any]:
    """Return a loader whose batches are those of one process."""
    return DataLoader(make_samples(tokens), batch_size=GLOBAL_BATCH // case.processes)
