"""Who is writing somewhere: names of processes that others can tell dead from alive, and locks of folders."""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torchacc.errors import CheckpointError
from torchacc.logging import get_logger

_log = get_logger(__name__)

_PATIENCE_SECS = 3.0
"""How long a process that was just killed may take to be gone."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""What a file system without locks answers."""


def new_token() -> str:
    """Return a name for something unfinished, which says which process makes it."""
    return f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"


def is_abandoned(token: str) -> bool:
    """Return whether what has this name was made by a process of this machine that has ended; False where unknown."""
    machine, _, rest = token.partition("-")
    pid = rest.partition("-")[0]
    return machine == _machine() and pid.isascii() and pid.isdigit() and not _is_alive(int(pid))


@cache
def _machine() -> str:
    """Return what tells processes with one numbering from all others: containers have one of their own."""
    facts = [socket.gethostname()]
    with suppress(OSError):
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
        facts.append(os.readlink("/proc/self/ns/pid"))
    return blake2b("\n".join(facts).encode(errors="replace"), digest_size=4).hexdigest()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    with suppress(OSError, IndexError):  # killed, and not yet waited for by its parent
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return True


class FolderLock:
    """Keeps a folder for the processes of one job: this one holds it, until it lets go or ends, however it ends.

    A lock of the system's on a file `.lock` in the folder (`fcntl`, which NFS knows, and which children of this process
    do not inherit); the file says who holds it. Several in one process share it.
    """

    _held: dict[tuple[int, Path], tuple[int, int]] = {}
    """Process and file -> descriptor, and how many hold it. A forked child has copies of its parent's."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.resolve() / ".lock"
        self._is_held = False

    def take(self) -> None:
        """Take the lock, unless this one has it.

        Raises:
            CheckpointError: Another process has it.
        """
        if self._is_held:
            return
        key = os.getpid(), self._path
        file, count = self._held.get(key) or (_locked(self._path), 0)
        self._held[key] = file, count + 1
        self._is_held = True

    def release(self) -> None:
        """Release the lock, if this one holds it."""
        key = os.getpid(), self._path
        if not self._is_held or key not in self._held:
            return
        self._is_held = False
        file, count = self._held.pop(key)
        if count > 1:
            self._held[key] = file, count - 1
            return
        with suppress(OSError):
            self._path.unlink()  # while it is held: who opens it later makes another
        os.close(file)


def _locked(path: Path) -> int:
    """Return the descriptor of a file that this process has locked."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(file), os.stat(path))  # else who held it has removed it just now
        except FileNotFoundError:
            is_there = False
        except OSError as error:
            holder = _holder(file)
            if error.errno in _NO_LOCKS and not (holder and _runs_here(holder)):
                _log.warning("%s cannot be locked (%s): see to it that one job uses it", path.parent, error.strerror)
                is_there = True
            elif time.monotonic() < deadline:
                is_there = False
            else:
                os.close(file)
                raise CheckpointError(
                    f"{path.parent} is in use by another job, {_described(holder)}: one at a time may save there. Wait "
                    "for its end, or name another folder"
                ) from None
        if is_there:
            started = datetime.now(timezone.utc).isoformat(timespec="seconds")
            note = {"host": socket.gethostname(), "pid": os.getpid(), "since": started, "token": new_token()}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(note).encode(), 0)
            return file
        os.close(file)
        time.sleep(0.05)


def _holder(file: int) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(os.pread(file, 4096, 0))
        return found if isinstance(found, dict) else {}
    return {}


def _runs_here(holder: dict[str, Any]) -> bool:
    """Return whether who has noted itself may still run: where locks cannot tell."""
    token = holder.get("token")
    return isinstance(token, str) and token.startswith(_machine()) and not is_abandoned(token)


def _described(holder: dict[str, Any]) -> str:
    if not {"host", "pid", "since"} <= holder.keys():
        return "which has not said who it is"
    return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
