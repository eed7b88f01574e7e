"""Runs one process of a job and tells how it ended: `python start_rank.py FOLDER LOCAL_RANK`. A script of its own.

`torchrun` starts it, once for each process. It imports the standard library only, so that it costs a few MB and
milliseconds. Signals of the job reach the process itself, as both are of one process group.
"""

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_CHUNK_BYTES = 1 << 16


def main(folder: Path, local_rank: int) -> None:
    """Run the job's command as this rank, and end as it ends."""
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the process would inherit
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    rank = job["first_rank"] + local_rank
    is_shown, is_copied = local_rank in job["shown"], job["prefixes"] or job["copies"]
    start: partial[subprocess.Popen[bytes]] = partial(subprocess.Popen, job["command"], preexec_fn=end_with_parent)
    if is_shown and not is_copied:
        process = start()
    else:
        log = (folder / f"rank-{rank}.log").open("ab", buffering=0)
        outputs = (subprocess.PIPE, subprocess.PIPE) if is_shown else (log, subprocess.STDOUT)
        process = start(stdin=None if is_shown else subprocess.DEVNULL, stdout=outputs[0], stderr=outputs[1])
    facts: dict[str, Any] = {"keeper": os.getpid(), "pid": process.pid, "status": None, "ended": None}
    write(folder, local_rank, facts)
    if is_shown and is_copied:
        copy(process, log, f"[rank {rank}] ".encode() if job["prefixes"] else b"")
    status = process.wait()
    write(folder, local_rank, facts | {"status": status, "ended": time.time()})
    sys.exit(status if status >= 0 else 128 - status)


def end_with_parent() -> None:
    """Have the kernel end this process when its parent does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def copy(process: subprocess.Popen[bytes], log: IO[bytes], prefix: bytes) -> None:
    """Copy what a process prints to the terminal and to a file, until it ends."""
    with selectors.DefaultSelector() as selector:
        for source, target in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            assert source is not None
            os.set_blocking(source.fileno(), False)
            selector.register(source, selectors.EVENT_READ, _lines_to(target, prefix))
        while selector.get_map():
            # A child of the process may hold its output open for longer than it lives.
            ended = process.poll() is not None
            ready = selector.select(timeout=0.1)
            for key, _ in ready:
                chunk = os.read(key.fd, _CHUNK_BYTES)
                log.write(chunk)
                key.data(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            if ended and not ready:
                return


def _lines_to(target: IO[bytes], prefix: bytes) -> Callable[[bytes], None]:
    """Return what writes chunks to a terminal; with a prefix, which each line gets, by whole lines."""
    left = b""

    def write_chunk(chunk: bytes) -> None:
        nonlocal left
        if prefix:
            *lines, left = (left + chunk).split(b"\n")
            lines += [left] if left and not chunk else []
            chunk = b"".join(prefix + line + b"\n" for line in lines)
        target.write(chunk)
        target.flush()

    return write_chunk


def write(folder: Path, local_rank: int, facts: dict[str, Any]) -> None:
    """Write what is known of the process, whole or not at all."""
    path = folder / f"local-rank-{local_rank}.json"
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(facts), encoding="utf-8")
    aside.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
