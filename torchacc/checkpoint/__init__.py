"""Checkpoints that load at any number of devices and in any engine."""

from torchacc.checkpoint.live import load as load
from torchacc.checkpoint.live import save as save
from torchacc.checkpoint.live import snapshot as snapshot
from torchacc.checkpoint.live import verify as verify
from torchacc.checkpoint.manager import CheckpointManager as CheckpointManager
from torchacc.checkpoint.manager import Restored as Restored

__all__ = ["CheckpointManager", "Restored", "load", "save", "snapshot", "verify"]
