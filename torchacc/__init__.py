"""Train PyTorch models fully sharded on XLA devices and natively, with a few lines added to a script."""

from torchacc import checkpoint as checkpoint
from torchacc import dist as dist
from torchacc.api import Description as Description
from torchacc.api import accelerate as accelerate
from torchacc.api import accumulate as accumulate
from torchacc.api import compile_report as compile_report
from torchacc.api import describe as describe
from torchacc.api import full_state_dict as full_state_dict
from torchacc.api import mark_step as mark_step
from torchacc.api import optim_state_dict as optim_state_dict
from torchacc.api import shard_loader as shard_loader
from torchacc.api import state_dict as state_dict
from torchacc.api import sync as sync
from torchacc.checkpoint.model_state import FullStateDictConfig as FullStateDictConfig
from torchacc.checkpoint.model_state import StateDictType as StateDictType
from torchacc.checkpoint.model_state import TensorShard as TensorShard
from torchacc.checkpoint.other_formats.object_files import load as load
from torchacc.checkpoint.other_formats.object_files import save as save
from torchacc.config import Config as Config
from torchacc.data import AsyncLoader as AsyncLoader
from torchacc.engines.compile_report import CompileReport as CompileReport
from torchacc.engines.deferred import deferred_init as deferred_init
from torchacc.engines.scaler import GradScaler as GradScaler
from torchacc.errors import CheckpointError as CheckpointError
from torchacc.errors import ConfigError as ConfigError
from torchacc.errors import DataError as DataError
from torchacc.errors import EngineError as EngineError
from torchacc.errors import TrainingError as TrainingError
from torchacc.functional import fsdp as fsdp

__version__ = "0.1.0"

__all__ = [
    "AsyncLoader",
    "CheckpointError",
    "CompileReport",
    "Config",
    "ConfigError",
    "DataError",
    "Description",
    "EngineError",
    "FullStateDictConfig",
    "GradScaler",
    "StateDictType",
    "TensorShard",
    "TrainingError",
    "accelerate",
    "accumulate",
    "checkpoint",
    "compile_report",
    "deferred_init",
    "describe",
    "dist",
    "fsdp",
    "full_state_dict",
    "load",
    "mark_step",
    "optim_state_dict",
    "save",
    "shard_loader",
    "state_dict",
    "sync",
]
