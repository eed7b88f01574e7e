"""What torch_xla and TorchAcc keep under this name."""

from torchacc.checkpoint.other_formats.rank_conversion import consolidate_sharded_model_checkpoints

__all__ = ["consolidate_sharded_model_checkpoints"]
