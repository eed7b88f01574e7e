"""transformers' `Trainer` on torchacc's engines: its loop, our sharding, data and checkpoints."""

import importlib.util

if importlib.util.find_spec("accelerate") is None:
    raise ImportError(
        "transformers' Trainer needs the package accelerate, which is not installed: pip install 'torchacc[hf]'"
    )

from torchacc.integrations.hf.subclasses import arguments_for, trainer_for
from torchacc.integrations.hf.trainer import Trainer
from torchacc.integrations.hf.training_arguments import TrainingArguments

__all__ = ["Trainer", "TrainingArguments", "arguments_for", "trainer_for"]
