"""What a training step needs in bytes on each device, before there is any device."""

from torchacc.memory_plan.step import PLANNED_BACKENDS, Step, count_states, study
from torchacc.memory_plan.strategies import DeviceBytes
from torchacc.memory_plan.trace import WithoutValues

__all__ = ["DeviceBytes", "PLANNED_BACKENDS", "Step", "WithoutValues", "count_states", "study"]
