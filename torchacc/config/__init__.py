"""Configuration: sections of plain data, and `resolve()`, which checks and completes them."""

from torchacc.config.resolve import requested_devices, resolve
from torchacc.config.root import Config
from torchacc.config.sections import Section, nearest

__all__ = ["Config", "Section", "nearest", "requested_devices", "resolve"]
