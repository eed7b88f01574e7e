"""Scale losses, so that gradients in float16 neither vanish nor become infinite."""

from collections import defaultdict

import torch
from torch import nn
from torch.amp import grad_scaler

from torchacc.engines.sharded_model import sharded_model
from torchacc.errors import ConfigError


class GradScaler(grad_scaler.GradScaler):
    """PyTorch's `GradScaler` for a sharded model: if any process finds an infinite gradient, all skip the step.

    Without `config.compute.fp16` it is disabled, like PyTorch's with `enabled=False`, so that the same script runs in
    every precision and engine. Save its `state_dict()` in the checkpoint (`extra=`).

    Example:
        >>> scaler = torchacc.GradScaler(model)
        >>> for batch in loader:
        ...     optimizer.zero_grad()
        ...     scaler.scale(model(**batch).loss).backward()
        ...     scaler.unscale_(optimizer)  # before clipping
        ...     model.clip_grad_norm_(1.0)
        ...     scaler.step(optimizer)
        ...     scaler.update()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        """Create a scaler for the optimizers of one model.

        Args:
            model: The model that `accelerate()` returned.
            init_scale: Initial factor of the loss.
            growth_factor: Factor of the scale after `growth_interval` steps.
            backoff_factor: Factor of the scale after a skipped step.
            growth_interval: Number of consecutive steps without an infinite gradient before the scale grows.

        Raises:
            ConfigError: No sharded model is passed.
        """
        if model is None or isinstance(model, str | torch.device):  # the device, as PyTorch's takes it
            raise ConfigError(
                "torchacc.GradScaler() is of one model, whose processes skip a step together: write "
                "torchacc.GradScaler(model), with the model that accelerate() returned"
            )
        sharded = sharded_model(model)
        super().__init__(
            sharded.engine.device.type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=sharded.plan.compute_dtype == "float16",
        )
        sharded.status.note_scaler()
        self._group = sharded.engine.group

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale this process's shards, and tell the others what was found. Collective: every process.

        PyTorch's own agrees over the mesh of the first gradient alone. Here gradients may lie on several.
        """
        shards: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                shard = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                shards[shard.device, shard.dtype].append(shard)
        found = found_inf.clone()
        for (device, _), alike in shards.items():
            flag = found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(alike, flag, inv_scale.to(device))
            found += flag.to(found.device)
        return {found.device: (self._group.all_reduce_mean(found) > 0).float()}
