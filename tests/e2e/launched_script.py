"""What the processes of test_launch.py run: rank 1 does what it is told to."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

told, folder = sys.argv[1], Path(sys.argv[2])
rank = int(os.environ["RANK"])


def save_and_end(number, frame) -> None:
    time.sleep(0.5)
    (folder / f"saved-{rank}").touch()
    sys.exit(143)


def is_gone(file) -> bool:
    """Return whether the launcher has seen the end of a rank: it has a number until then."""
    if not file.exists() or not file.read_text():
        return False
    try:
        os.kill(int(file.read_text()), 0)
    except ProcessLookupError:
        return True
    return False


if told == "save":
    signal.signal(signal.SIGTERM, save_and_end)
print(f"rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
(folder / f"pid-{rank}").write_text(str(os.getpid()))
while rank == 1 and not (folder / "pid-0").exists():  # what rank 0 prints is looked for, too
    time.sleep(0.05)
if rank == 0 and told == "raise":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    (folder / "child").write_text(str(child.pid))
while told == "raise" and not (folder / "child").exists():
    time.sleep(0.05)
if rank == 1 and told == "raise":
    raise ValueError("rank one has had enough")
if told == "leave":
    while rank == 0 and not is_gone(folder / "pid-1"):
        time.sleep(0.05)
    sys.exit(int(rank == 0))
if rank == 1 and told == "fault":
    ctypes.string_at(0)
if rank == 1 and told == "misuse":
    sys.exit(2)
if rank == 1 and told == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and told == "speak":
    print("a warning of a library's\ntorchacc[1]: what is so on rank 1", file=sys.stderr, flush=True)
if told not in ("end", "speak"):
    time.sleep(100)
