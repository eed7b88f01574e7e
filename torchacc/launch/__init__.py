"""Start the processes of a job with `torchrun`, watch over them, and end them together."""

from torchacc.launch.options import LaunchOptions as LaunchOptions
from torchacc.launch.runner import run as run

__all__ = ["LaunchOptions", "run"]
