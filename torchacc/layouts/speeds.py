"""How fast devices compute, and send to one another: published figures, or those of an option."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torchacc.config.names import nearest
from torchacc.errors import ConfigError, shown


@dataclass(frozen=True)
class DeviceSpeeds:
    """What an estimate of a step's time goes by."""

    name: str
    flops_per_second: float
    """Of matrix products in bfloat16."""
    memory_bytes_per_second: float
    near_bytes_per_second: float
    """That a device sends to those of its machine, in one direction."""
    far_bytes_per_second: float
    """That it sends to those of other machines."""
    devices_per_machine: int
    float32_share: float
    """Of the FLOP/s, what products in float32 have, which PyTorch does not round to TF32 by itself."""
    seconds_per_exchange: float = 20e-6
    """What an exchange takes beside its bytes."""
    seconds_per_operation: float = 10e-6
    """What a host takes to call one operation of forward or backward, whatever its size."""
    overlaps: bool = True
    """Whether weights and gradients travel, and the host calls the next operations, while the device computes."""
    scatters: bool = True
    """Whether reducing gradients to shards sends no more than these; gloo sums all to all, and takes a shard of it."""
    efficiency: float = 0.6
    """Of the FLOP/s, what large products reach."""
    memory_bytes: int | None = None
    devices_per_processor: float = 1.0
    """How many share what computes, as processes share the cores of a CPU; one that waits leaves it to the others."""


DEVICES: Mapping[str, DeviceSpeeds] = {
    "a100": DeviceSpeeds("A100 SXM 80GB", 312e12, 2039e9, 300e9, 25e9, 8, 19.5 / 312, memory_bytes=80 * 10**9),
    "h100": DeviceSpeeds("H100 SXM", 989e12, 3350e9, 450e9, 50e9, 8, 67 / 989, memory_bytes=80 * 10**9),
    "h200": DeviceSpeeds("H200 SXM", 989e12, 4800e9, 450e9, 50e9, 8, 67 / 989, memory_bytes=141 * 10**9),
    "b200": DeviceSpeeds("B200", 2250e12, 8000e9, 900e9, 50e9, 8, 75 / 2250, memory_bytes=180 * 10**9),
}
"""By the names that `--device` takes: NVIDIA's published figures, of dense matmuls, with one network card of 200
(A100) or 400 Gbit/s for each GPU."""


def find_device(name: str, option: str = "--device") -> DeviceSpeeds:
    """Return the speeds of a device by its name, or by its own figures.

    Args:
        name: One of `DEVICES`, or `FLOPS,MEMORY,NEAR,FAR,PER_MACHINE`, each per second, such as `9e10,1e10,1e9,1e9,4`:
            a device whose matmuls have these FLOP/s in every dtype, and that sends through gloo, as processes on
            CPUs do: only while it does not compute, and to reduce gradients as much as all of them twice.
            A sixth figure is the seconds that an exchange takes beside its bytes, such as `5e-5`, a seventh how many
            devices share what computes, such as `4` for eight processes on two cores, and an eighth the seconds that
            a host takes to call an operation, such as `1e-5`, before the device runs it.
        option: What was given the name, for the message.

    Raises:
        ConfigError: There is no such device.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    try:
        flops, memory, near, far, per_machine, *more = (float(part) for part in name.split(","))
        defaults = (DeviceSpeeds.seconds_per_exchange, 1.0, DeviceSpeeds.seconds_per_operation)
        latency, sharing, call = (*more, *defaults[len(more) :])
        above_zero = (flops, memory, near, far, latency, call)
        if not all(0 < each < math.inf for each in above_zero) or not 1 <= sharing < math.inf:
            raise ValueError
        if per_machine < 1 or per_machine != int(per_machine):
            raise ValueError
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{option} {shown(name)}: there is no such device ({nearest(name, DEVICES)}). Or write FLOP/s, bytes/s of "
            "its memory, to devices of its machine and to other machines, devices of a machine, and, if you like, the "
            "seconds of an exchange beside its bytes, how many devices share a processor, and the seconds in which a "
            "host calls an operation: 9e10,1e10,1e9,1e9,4 or 9e10,1e10,1e9,1e9,8,5e-5,4,1e-5"
        ) from None
    return DeviceSpeeds(
        name,
        *(flops, memory, near, far, int(per_machine)),
        float32_share=1.0,
        seconds_per_exchange=latency,
        devices_per_processor=sharing,
        seconds_per_operation=call,
        overlaps=False,
        scatters=False,
        efficiency=1.0,
    )
