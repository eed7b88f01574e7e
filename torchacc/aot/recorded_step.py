"""Record one step of training, for a mesh of any size: forward, backward and the optimizer's update in one program."""

from collections.abc import Callable, Mapping
from copy import deepcopy

import torch
from torch import nn

from torchacc.attach import attach
from torchacc.config import Config, resolve
from torchacc.engines import registry
from torchacc.engines.xla.recording import Program, RecordingEngine, named_operations
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError, in_one_line
from torchacc.parallel.mesh import from_config
from torchacc.parallel.plan import make_plan

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def record_step(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    config: Config,
    make_optimizer: MakeOptimizer,
    *,
    num_devices: int,
    platform: str,
    clips: bool = False,
) -> Program:
    """Record a training step of the SPMD engine.

    Starts XLA's runtime, with devices that nothing runs on, so that a process that records cannot train.

    Args:
        model: On the meta device, in training mode, with a `loss` among what it returns. It is sharded in place.
        batch: Of all devices, on the meta device.
        config: Its sizes together are `num_devices`.
        make_optimizer: Makes the optimizer of the sharded parameters.
        num_devices: All devices.
        platform: Of the devices, as PJRT_DEVICE names it.
        clips: Whether the gradients are clipped by their norm, which reads all of them before the first update.

    Raises:
        ConfigError: The config contradicts itself, or the batch does not divide.
    """
    config = deepcopy(config)
    config.backend, config.dist.fsdp.use_spmd = "xla", True
    config = resolve(config, Job(), num_devices=num_devices)
    engine = RecordingEngine(platform=platform, config=config, mesh=from_config(config), job=Job())
    rows = next(iter(batch.values())).shape[0]
    if rows % engine.mesh.data_parallel_size:
        raise ConfigError(f"a batch of {rows} samples does not divide by {engine.mesh.data_parallel_size} devices")
    engine.check(model)
    plan = make_plan(model, config, engine.mesh)
    registry.activate(engine, plan)
    _give_buffers_values(model)
    with named_operations(model):  # before the layers of a loop are sharded, which takes no further hook
        sharded = engine.apply(model, plan, None)
        sharded.status.mark_weights_loaded()
        attach(sharded)
        optimizer = make_optimizer([each for each in model.parameters() if each.requires_grad])
        inputs = engine.to_device(dict(batch))
        try:
            loss = model(**inputs).loss
        except EngineError:
            raise
        except Exception as error:  # it is the model's own code that runs
            raise ConfigError(
                f"{type(model).__name__} cannot be compiled, as it does not train with {', '.join(batch)}: "
                f"{type(error).__name__}: {in_one_line(error)}"
            ) from error
        loss.backward()
        if clips:
            sharded.clip_grad_norm_(1.0)
        optimizer.step()
        state = [value for each in optimizer.state.values() for value in each.values()]
        on_devices = [each for each in state if isinstance(each, torch.Tensor) and each.device.type == "xla"]
        return engine.program(loss, [*model.parameters(), *model.buffers(), *on_devices])


def _give_buffers_values(model: nn.Module) -> None:
    """Make buffers, such as those of rotary positions, zeros on the host, from where they are moved to each device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
