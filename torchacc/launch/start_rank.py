"""Becomes one process of a job: `python -I -S start_rank.py LAUNCHER_PID LOCAL_RANK COMMAND...`. A script of its own.

The kernel ends the process when the launcher ends, also where that is killed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, local_rank: int, command: list[str]) -> None:
    """Run the command in place of this script."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the line above
        sys.exit(1)
    if local_rank:  # what is typed is the first one's
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
