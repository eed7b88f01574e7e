"""The errors that torchacc raises for what a user can mend. Each says what was passed, why not, and what to write."""


class ConfigError(ValueError):
    """A configuration that contradicts itself, the model, or the devices of the job."""


class DataError(ValueError):
    """A data loader or a batch that cannot be sharded or padded as asked."""


class EngineError(RuntimeError):
    """An engine that cannot start or go on on this machine."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, and the tensor where there is one."""


class TrainingError(RuntimeError):
    """A run that cannot go on, as its numbers are not finite any more."""


def in_one_line(error: BaseException) -> str:
    """Return what an error of another library says, its first 300 characters, without line breaks."""
    return " ".join(str(error).split())[:300]
