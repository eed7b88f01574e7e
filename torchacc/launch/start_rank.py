"""Runs one process of a job and tells how it ended: `python start_rank.py FOLDER LOCAL_RANK`. A script of its own.

`torchrun` starts it, once for each process. It imports the standard library only, so that it costs a few MB and
milliseconds. Signals of the job reach the process itself, as both are of one process group.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(folder: Path, local_rank: int) -> None:
    """Run the job's command as this rank, and end as it ends."""
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the process would inherit
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    output = None  # the launcher's
    if local_rank not in job["on_terminal"]:
        output = (folder / f"rank-{job['first_rank'] + local_rank}.log").open("ab")
    process = subprocess.Popen(
        job["command"], stdin=output and subprocess.DEVNULL, stdout=output, stderr=output and subprocess.STDOUT,
        preexec_fn=end_with_parent,
    )  # fmt: skip
    facts: dict[str, Any] = {"keeper": os.getpid(), "pid": process.pid, "status": None, "ended": None}
    write(folder, local_rank, facts)
    status = process.wait()
    write(folder, local_rank, facts | {"status": status, "ended": time.time()})
    sys.exit(status if status >= 0 else 128 - status)


def end_with_parent() -> None:
    """Have the kernel end this process when its parent does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def write(folder: Path, local_rank: int, facts: dict[str, Any]) -> None:
    """Write what is known of the process, whole or not at all."""
    path = folder / f"local-rank-{local_rank}.json"
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(facts), encoding="utf-8")
    aside.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
