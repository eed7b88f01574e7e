"""Run scripts in forks of a process that has imported PyTorch: alone, or on ranks as `torchrun --standalone` does.

    python forkrun.py 4 script.py [argument ...]        on a shell, one job
    forkrun.run("script.py", "argument", num_ranks=4)   in a test: all jobs of a pytest process are forks of one

Importing PyTorch and transformers takes each process several seconds, which is most of what a short script takes. Where
one rank fails the others are ended. Unlike torchrun's, these ranks have one seed of hashes in common: what depends on
the order of a set shows in the tests that use torchrun, such as those of the contract's engines.

What a library reads from the environment while it is imported is pytest's, but for `IMPORT_VARIABLES`: jobs that differ
in these are forks of other processes.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMPORTED = ("torch.distributed.fsdp", "transformers.models.gpt2.modeling_gpt2")
IMPORT_VARIABLES = ("USE_TORCH_XLA", "HF_HOME")
SERVE = "--serve"


def start(num_ranks: int) -> None:
    """Return in each rank, with its environment; in this process, end when all have."""
    with socket.create_server(("localhost", 0)) as server:
        job = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    pids = []
    for rank in range(num_ranks):
        pids.append(os.fork())
        if not pids[-1]:
            job |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.environ |= {**job, "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
            importlib.import_module("numpy").random.seed()  # Python's own generator does that by itself
            return

    def end(*_: object) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status and not failed:
            failed = True
            end()
    sys.exit(failed)


def serve() -> tuple[int, list[str]]:
    """Fork a job for each line of input; return in each of them the number of its ranks, and its command."""
    own = dict(os.environ)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            become(job, own)
            return job["num_ranks"], job["command"]
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()


def become(job: dict[str, Any], own: dict[str, str]) -> None:
    """Take on a job's folder, files and environment, in a session of its own."""
    os.setsid()
    os.chdir(job["cwd"])
    for number, path in enumerate([os.devnull, job["stdout"], job["stderr"]]):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    set_by_imports = {name: value for name, value in os.environ.items() if own.get(name) != value}
    os.environ.clear()
    os.environ.update(set_by_imports | job["env"])
    sys.path[1:1] = [path for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    importlib.import_module("numpy").random.seed()
    importlib.import_module("torch").default_generator.seed()  # that a job draws as the one before would hide much


class Server:
    """A process that forks jobs of this one, one after another."""

    def __init__(self, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, SERVE],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def run(self, job: dict[str, Any], timeout: float) -> int | None:
        """Return how a job has ended; None where it had to be killed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        pid = self._read(None)
        try:
            ended = self._read(time.monotonic() + timeout)
        except BaseException:  # pytest's own time is up, or Ctrl-C
            os.killpg(pid, signal.SIGKILL)
            raise
        if ended is None:
            os.killpg(pid, signal.SIGKILL)
            self._read(None)
        return ended

    def _read(self, until: float | None) -> int | None:
        """Return the number on the next line; None where it does not come in time."""
        assert self._process.stdout is not None
        left = None if until is None else max(0.0, until - time.monotonic())
        if not select.select([self._process.stdout], [], [], left)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks the tests' jobs has ended")
        return int(line)

    def close(self) -> None:
        """Let the process end."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()


_servers: dict[tuple[str | None, ...], Server] = {}
"""Those that are running, by the values of `IMPORT_VARIABLES`."""


@atexit.register
def _close() -> None:
    while _servers:
        _servers.popitem()[1].close()


def run(
    script: str | Path,
    *arguments: object,
    num_ranks: int = 0,
    env: Mapping[str, str] = os.environ,
    cwd: str | Path = ".",
    timeout: float = 500,
    merged: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a script and return how it ended, with what it printed.

    Args:
        script: A file of Python.
        arguments: Its arguments.
        num_ranks: On how many ranks; 0 is none, where nothing of a launcher is in the environment.
        env: Its environment.
        cwd: Its folder.
        timeout: Seconds after which it is killed.
        merged: Whether what it prints as errors comes among the rest.

    Raises:
        subprocess.TimeoutExpired: It was killed.
    """
    command = [str(script), *map(str, arguments)]
    key = tuple(env.get(name) for name in IMPORT_VARIABLES)
    if key not in _servers:
        if len(_servers) > 1:  # each has its memory, and a file of tests needs two at most
            _close()
        shared = {name: value for name, value in os.environ.items() if name not in IMPORT_VARIABLES}
        own = {name: env[name] for name in IMPORT_VARIABLES if name in env}
        _servers[key] = Server(shared | own | {"HF_HUB_OFFLINE": "1"})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        err = out if merged else Path(folder, "err")
        files = {"stdout": str(out), "stderr": str(err)}
        job = {"command": command, "num_ranks": num_ranks, "env": dict(env), "cwd": str(Path(cwd).resolve()), **files}
        try:
            code = _servers[key].run(job, timeout)
        except BaseException:
            _servers.pop(key).close()  # what it says next would be of this job
            raise
        printed = [path.read_text(errors="replace") for path in ([out] if merged else [out, err])]
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout, *printed)
        return subprocess.CompletedProcess(command, code, *printed)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    if sys.argv[1] == SERVE:
        gc.freeze()
        number, sys.argv = serve()
    else:
        number, sys.argv = int(sys.argv[1]), sys.argv[2:]
    if number:
        start(number)
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
