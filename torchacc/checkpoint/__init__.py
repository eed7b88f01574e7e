"""Checkpoints that load at any number of devices and in any engine."""

from torchacc.checkpoint.loader import load as load
from torchacc.checkpoint.loader import verify as verify
from torchacc.checkpoint.manager import CheckpointManager as CheckpointManager
from torchacc.checkpoint.manager import Restored as Restored
from torchacc.checkpoint.saver import save as save
from torchacc.checkpoint.saver import snapshot as snapshot

__all__ = ["CheckpointManager", "Restored", "load", "save", "snapshot", "verify"]
