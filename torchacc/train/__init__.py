"""Trains from a YAML file: stages, their text, and what a person sees of them."""

from torchacc.train.command import train_production_mode as train_production_mode

__all__ = ["train_production_mode"]
