"""Runs `torchrun` for the launcher: `python start_torchrun.py FOLDER LAUNCHER_PID ARGUMENTS`. A script of its own.

What torchrun itself says goes to a file, while the processes that it starts have this one's terminal. It ends when the
launcher does, also when that is killed.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main(folder: Path, launcher: int, arguments: list[str]) -> None:
    """Become torchrun."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it ended before this was heard
        sys.exit(1)
    sys.stderr = (folder / "torchrun.log").open("a", buffering=1, encoding="utf-8")
    if sys.path[0] == str(Path(__file__).parent):
        sys.path.pop(0)
    sys.argv = ["torchrun", *arguments]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
