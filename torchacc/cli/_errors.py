"""How a command tells what its user has to mend: in a line, and with a traceback only where one is asked for."""

import sys
from collections.abc import Callable

from torchacc.env import get
from torchacc.errors import CheckpointError, ConfigError, DataError, EngineError, TrainingError

_VARIABLE = "TORCHACC_TRACEBACK"


def exit_status(run: Callable[[], int], *, traceback: bool = False) -> int:
    """Run a command, and return its exit status: 2 where the user has something to mend.

    Args:
        run: The command.
        traceback: Whether to let errors through; as does the variable TORCHACC_TRACEBACK, unless it is empty or 0.
    """
    try:
        return run()
    except (CheckpointError, ConfigError, DataError, EngineError, TrainingError) as error:
        if traceback or get(_VARIABLE) not in (None, "", "0"):
            raise
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
