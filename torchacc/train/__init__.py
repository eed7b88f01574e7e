"""Train from a YAML file: stages, their text, their metrics and reports."""

from torchacc.train.run import train_production_mode as train_production_mode

__all__ = ["train_production_mode"]
