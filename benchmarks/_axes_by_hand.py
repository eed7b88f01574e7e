"""The axes of `axes_time.py` as PyTorch's and DeepSpeed's own pages write them, in two processes."""

from typing import Any

import torch
import torch.distributed as dist
from _cases import LEARNING_RATE
from _training import Steps, make_optimizer, train
from torch import nn
from torch.nn import functional as F

PROCESSES = 2


def split_layers(model: Any, tokens: torch.Tensor, batch_size: int) -> Steps:
    """Split layers as PyTorch's tutorial of tensor parallelism does, and return what trains them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (PROCESSES,)), plan)
    split = [each for each in model.parameters() if isinstance(each, DTensor)]
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], lr=LEARNING_RATE)
    return train(model, optimizer, ({"input_ids": part, "labels": part} for part in tokens.split(batch_size)))


def split_stages(model: Any, tokens: torch.Tensor, batch_size: int, schedule: str, microbatches: int) -> Steps:
    """Cut a model in two as PyTorch's tutorial of pipeline parallelism does, and return what trains its stages."""
    from torch.distributed import pipelining

    rank, last, decoder = dist.get_rank(), PROCESSES - 1, model.model
    each = len(decoder.layers) // PROCESSES
    decoder.layers = decoder.layers[rank * each : (rank + 1) * each]
    if rank < last:
        decoder.norm, model.lm_head = nn.Identity(), nn.Identity()
    if rank > 0:
        decoder.embed_tokens = None

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = model(**{"inputs_embeds" if rank else "input_ids": given}).logits
            return logits

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    class Stage(pipelining.PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            return []  # a first exchange for NCCL, of an int64 into a float32, at which gloo ends the process

    part = Part()
    stage = Stage(part, rank, PROCESSES, torch.device("cpu"))
    kind = getattr(pipelining, schedule)
    takes_several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    runs = kind([stage] if takes_several else stage, microbatches, loss_of)
    optimizer = make_optimizer(part)
    for batch in tokens.split(batch_size):
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = {"target": batch, "losses": losses} if rank == last else {}
        runs.step(*([] if rank else [batch]), **given)
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, last)  # as each process has the loss of ours
        yield loss


def split_samples(model: Any, tokens: torch.Tensor, batch_size: int) -> Steps:
    """Split samples as DeepSpeed-Ulysses does, parameters by FSDP2 over the same processes, and train them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AttentionInterface

    AttentionInterface.register("ulysses_by_hand", _attend)
    model.set_attn_implementation("ulysses_by_hand")
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train_parts(model, make_optimizer(model), tokens, batch_size)


def _train_parts(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, batch_size: int) -> Steps:
    rank, length = dist.get_rank(), tokens.shape[1] // PROCESSES
    own = slice(rank * length, (rank + 1) * length)
    positions = torch.arange(tokens.shape[1])[None, own]
    for batch in tokens.split(batch_size):
        labels = F.pad(batch[:, 1:], (0, 1), value=-100)[:, own]
        optimizer.zero_grad()
        logits = model(input_ids=batch[:, own], position_ids=positions).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (batch.numel() - len(batch))
        (loss * PROCESSES).backward()  # FSDP2 averages gradients
        optimizer.step()
        whole = loss.detach()
        dist.all_reduce(whole)
        yield whole


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = (_SequenceAllToAll.apply(each, 1, 2) for each in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
    return _SequenceAllToAll.apply(output, 1, 2), None


class _SequenceAllToAll(torch.autograd.Function):
    """DeepSpeed's `_SeqAllToAll`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scattered: int, gathered: int) -> torch.Tensor:
        ctx.how = gathered, scattered
        parts = torch.stack(tensor.chunk(PROCESSES, scattered))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return torch.cat(received.unbind(), gathered)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _SequenceAllToAll.apply(gradient, *ctx.how), None, None
