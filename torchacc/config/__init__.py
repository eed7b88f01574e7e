"""Configuration: sections of plain data, and `resolve()`, which checks and completes them."""

from torchacc.config.resolve import requested_devices, resolve
from torchacc.config.root import Config
from torchacc.config.sections import (
    ComputeConfig,
    DataLoaderConfig,
    DistConfig,
    DPConfig,
    EPConfig,
    FSDPConfig,
    MemoryConfig,
    PPConfig,
    Section,
    SPConfig,
    TPConfig,
)

__all__ = [
    "ComputeConfig",
    "Config",
    "DPConfig",
    "DataLoaderConfig",
    "DistConfig",
    "EPConfig",
    "FSDPConfig",
    "MemoryConfig",
    "PPConfig",
    "SPConfig",
    "Section",
    "TPConfig",
    "requested_devices",
    "resolve",
]
