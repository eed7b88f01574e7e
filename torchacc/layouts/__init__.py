"""Which layouts of a model on so many devices fit their memory, and which of them should be the fastest."""

from torchacc.layouts.search import Candidate, PlannedLayout, Search, search
from torchacc.layouts.speeds import DEVICES, DeviceSpeeds, find_device

__all__ = ["DEVICES", "Candidate", "DeviceSpeeds", "PlannedLayout", "Search", "find_device", "search"]
