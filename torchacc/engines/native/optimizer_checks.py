"""What is said of an optimizer before its first step: what it gathers, how slow it is, what cannot be right."""

import torch

from torchacc.engines.fused_steps import faster_choice
from torchacc.engines.optimizers import check_split, is_elementwise, is_of_torchao
from torchacc.engines.sharded_model import ShardedModel
from torchacc.errors import ConfigError
from torchacc.logging import get_logger

_log = get_logger(__name__)


def check(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Refuse or warn of an optimizer of a model.

    Raises:
        ConfigError: It cannot be right with how the model is sharded.
    """
    if sharded.shards.coordinates.is_split:
        _check_shards(sharded, optimizer)
    if is_of_torchao(optimizer):
        _check_rounding(optimizer, sharded.shards.coordinates.num_replicas)
    if sharded.plan.compute_dtype != "float16":
        _recommend(optimizer, sharded.engine.device)
    elif not sharded.status.has_scaler:
        _log.warning(
            "compute.fp16 without a torchacc.GradScaler(model): gradients below 6e-8 become zero, and large ones "
            "infinite. Scale the loss with one, or use config.compute.bf16 = True, which needs none"
        )


def _check_shards(sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
    """Warn of an optimizer that gathers unsharded weights; refuse it where layers are split."""
    name, plan, alone = type(optimizer).__name__, sharded.plan, is_elementwise(optimizer)
    check_split(name, is_elementwise=alone, num_stages=plan.pipeline.size, num_parts=plan.tensor_parallel.size)
    if alone or is_of_torchao(optimizer):
        return
    _log.warning(
        "%s is not known to update each element by itself: norms, means and products of full weights are "
        "right, but each gathers the full weight, in time and memory",
        name,
    )


def _check_rounding(optimizer: torch.optim.Optimizer, num_replicas: int) -> None:
    """Refuse random rounding where copies of a weight would drift apart."""
    name = type(optimizer).__name__
    if getattr(optimizer, "bf16_stochastic_round", False) and num_replicas > 1:
        raise ConfigError(
            f"{name}(bf16_stochastic_round=True) with {num_replicas} replicas of each weight: each process rounds by "
            "its own random numbers, so that the replicas would drift apart. Shard over all devices, "
            "config.dist.fsdp.sharding_strategy = 'FULL_SHARD' with config.dist.dp.size = 1, or leave it out"
        )


def _recommend(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    faster = faster_choice(optimizer, device)
    if faster is not None:
        _log.info(
            "%s updates one parameter after the other; torch.optim.%s(…, %s) updates them together, and is faster",
            *[type(optimizer).__name__] * 2,
            faster,
        )
