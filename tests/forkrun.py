"""Run scripts in forks of a process that has imported PyTorch: alone, or on ranks as `torchrun --standalone` does.

    python forkrun.py 4 script.py [argument ...]        on a shell, one job
    forkrun.run("script.py", "argument", num_ranks=4)   in a test: all jobs of a run of pytest are forks of one
    forkrun.python()                                    a `python` for commands: what it runs is a fork, too

Importing PyTorch and transformers takes each process several seconds, which is most of what a short script takes. Where
one rank fails the others are ended. Unlike torchrun's, these ranks have one seed of hashes in common: what depends on
the order of a set shows in the tests that use torchrun, such as those of the contract's engines.

What a library reads from the environment while it is imported is pytest's, but for `IMPORT_VARIABLES`: jobs that differ
in these, or in what else is to be imported, are forks of other processes.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import hashlib
import importlib.util
import json
import os
import runpy
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = (
    "torch.distributed.fsdp",
    "torch._inductor.compile_fx",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "datasets",
    "peft",
    "torchacc",
)
"""What of it is installed; few jobs need all, and each server that imports anew takes longer than that."""
IMPORT_VARIABLES = ("USE_TORCH_XLA", "HF_HOME")
ROOT = Path(__file__).parents[1]
CLIENT = Path(__file__).with_name("fork_client.py")
SERVE = "--serve"
SHARED = "TESTS_FORKS"
"""The variable with the folder of the servers that a process and those which it starts have in common."""
OWNER = "owner"
"""The file in it with the id of the process with whose end they end."""
SECONDS_TO_START = 500
"""In a new environment Python compiles all that is imported, and reads it from the disk."""


def start(num_ranks: int) -> None:
    """Return in each rank, with its environment; in this process, end when all have."""
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
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


class Forks:
    """Forks a job for each connection, tells how it has ended, and kills it where the connection is closed."""

    def __init__(self, path: str, owner: int) -> None:
        self._path = path
        self._owner = os.pidfd_open(owner)
        self._own = dict(os.environ)
        self._events = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"{path}.new")
        self._server.listen(64)
        os.rename(f"{path}.new", path)  # which who wants to connect waits for
        self._events.register(self._server, selectors.EVENT_READ)
        self._events.register(self._owner, selectors.EVENT_READ)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, with whom all ends

    def serve(self) -> dict[str, Any]:
        """Return in each fork, with its job; in this process, never."""
        while True:
            for key, _ in self._events.select():
                if key.fileobj == self._owner:  # has ended
                    for pid in self._connections:
                        self._kill(pid)
                    sys.exit()
                if key.fileobj is self._server:
                    if job := self._fork(self._server.accept()[0]):
                        return job
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj, key.data)
                else:
                    self._reap(key.fd, key.data)

    def _fork(self, connection: socket.socket) -> dict[str, Any] | None:
        data, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
        while data and not data.endswith(b"\n"):
            data += connection.recv(1 << 16)
        if not data:
            connection.close()
            return None
        pid = os.fork()
        if not pid:
            job = json.loads(data)
            for number, file in enumerate(files):
                os.dup2(file, number)
            become(job, self._own, python_of(self._path))
            for other in (connection, self._server, *self._connections.values()):
                other.close()
            for file in files:
                os.close(file)
            os.close(self._owner)
            self._events.close()
            return job
        for file in files:
            os.close(file)
        self._connections[pid] = connection
        self._events.register(connection, selectors.EVENT_READ, pid)
        self._events.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        return None

    def _hear(self, connection: socket.socket, pid: int) -> None:
        """Pass a signal on, which is a byte; at the end of a connection, SIGKILL."""
        if pid not in self._connections:  # its job has ended, of which this process heard in the same moment
            return
        try:
            numbers = connection.recv(1)
        except ConnectionResetError:
            numbers = b""
        if numbers:
            os.kill(pid, numbers[0])
        else:
            self._events.unregister(connection)
            self._kill(pid)

    def _reap(self, file: int, pid: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._events.unregister(file)
        os.close(file)
        with self._connections.pop(pid) as connection, contextlib.suppress(KeyError, OSError):
            self._events.unregister(connection)
            connection.sendall(f"{code}\n".encode())

    def _kill(self, pid: int) -> None:
        """Kill a fork, and where it has come as far as a session of its own, its children."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


def become(job: dict[str, Any], own: dict[str, str], python: str) -> None:
    """Take on a job's folder and environment, in a session of its own, and let its processes be forks as well."""
    os.setsid()
    os.chdir(job["cwd"])
    set_by_imports = {name: value for name, value in os.environ.items() if own.get(name) != value}
    os.environ.clear()
    os.environ.update(set_by_imports | job["env"])
    if "torch_xla" in sys.modules:
        importlib.import_module("torch_xla")._setup_xla_flags()  # as it does when it is imported
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable = python
    tempfile.tempdir = None  # that of the environment
    sys.path[1:1] = [path for path in job["env"].get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    importlib.import_module("numpy").random.seed()
    importlib.import_module("torch").default_generator.seed()  # that a job draws as the one before would hide much


def execute(command: list[str]) -> None:
    """Run what follows `python` on a command line."""
    if command[0] == "-u" or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    command = command[command[0] == "-u" :]
    kind = command[0] if command[0] in ("-m", "-c") else ""
    sys.argv = command[1:] if kind else command
    if kind == "-m":
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0], code, sys.argv[0] = "", sys.argv[0], "-c"
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def end_with(run: Callable[[], object]) -> NoReturn:
    """Run, and end as Python would, but leave to the system what was imported.

    To take that apart one by one writes to all of the memory that forks have in common, which takes longer than most
    jobs.
    """
    code: Any = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            code = -signal.SIGINT
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def collect_rarely() -> None:
    """Let Python look for garbage in cycles seldom, and not among what has been imported by now.

    As often as by default that takes a few hundredths of the tests' time, most where PyTorch traces a model.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def share_gloos_thread() -> None:
    """Let a process's groups have one thread of gloo's in common that waits for the network, where each has its own.

    It wakes up a hundred times in a second, and tests have many groups. Of no effect where PyTorch has no gloo.
    """
    from torch.distributed import distributed_c10d

    own = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if own is None or own.__module__ != distributed_c10d.__name__:  # or this is a fork that runs this file
        return
    device = cache(own.create_default_device)  # of a fork, which makes it when it makes a group

    class GroupOfOneDevice(own):
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = own._Options()
            options._devices, options._timeout = [device()], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = GroupOfOneDevice


def compile_only_graphs() -> None:
    """Let Dynamo and inductor compile no C++ but that of graphs.

    In each process inductor would try by programs that import PyTorch which vector code there is beyond AVX-512's, and
    PyTorch 2.9 would compile what compares sizes that differ between calls, which later versions do in Python.
    """
    from torch._dynamo import config
    from torch._inductor import cpu_vec_isa

    config.enable_cpp_symbolic_shape_guards = False
    cpu_vec_isa.VecISA.check_build = lambda self, code: False


def python_of(path: str) -> str:
    """Return the `python` of the server at a socket."""
    return str(Path(path).with_name("python"))


class Server:
    """A process that forks jobs of this one and of others, until the owner of its folder ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = str(folder / "socket")

    def start(self, env: Mapping[str, str], *modules: str) -> None:
        """Start the process, where none of those that share the folder has done so."""
        with open(f"{self._folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(self.path):
                return
            self._folder.mkdir(exist_ok=True)
            python = Path(python_of(self.path))
            words = [sys.executable, "-I", "-S", str(CLIENT), self.path]
            python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            python.chmod(0o755)
            owner = (self._folder.parent / OWNER).read_text()
            command = [sys.executable, __file__, SERVE, self.path, owner, *modules]
            process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, stdout=2)
            until = time.monotonic() + SECONDS_TO_START
            while not os.path.exists(self.path):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the process that forks the tests' jobs did not start: {process.poll()}")
                time.sleep(0.02)
            process.returncode = 0  # Popen does not complain where this process ends before it

    def run(self, job: dict[str, Any], files: list[int], timeout: float) -> int | None:
        """Return how a job has ended; None where it had to be killed."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.path)
            connection.settimeout(timeout)
            data = json.dumps(job).encode() + b"\n"
            sent = socket.send_fds(connection, [data], files)
            connection.sendall(data[sent:])
            try:
                line = connection.makefile().readline()
            except TimeoutError:
                return None
        if not line:
            raise RuntimeError("the process that forks the tests' jobs has ended")
        return int(line)


def share() -> None:
    """Let the processes that this one starts have its servers."""
    os.environ[SHARED] = str(_folder())


@cache
def _folder() -> Path:
    """Return the folder of the servers, whose owner is this process unless it shares that of another."""
    if SHARED in os.environ:
        return Path(os.environ[SHARED])
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    (folder / OWNER).write_text(str(os.getpid()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_servers: dict[tuple[Any, ...], Server] = {}
"""Those in use, by the values of `IMPORT_VARIABLES` and what else they have imported."""


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _server(env: Mapping[str, str], imports: Sequence[str]) -> Server:
    modules = tuple(filter(_is_installed, imports))
    key = (*(env.get(name) for name in IMPORT_VARIABLES), modules)
    if key not in _servers:
        shared = {name: value for name, value in os.environ.items() if name not in IMPORT_VARIABLES}
        own = {name: env[name] for name in IMPORT_VARIABLES if name in env}
        _servers[key] = Server(_folder() / hashlib.sha256(repr(key).encode()).hexdigest()[:16])
        _servers[key].start(shared | own | {"HF_HUB_OFFLINE": "1"}, *modules)
    return _servers[key]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment in which a process imports this checkout, without network, with more variables."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"} | variables


def free_port() -> str:
    """Return the number of a port that nobody listens at.

    It is below those that the system gives to connections, which would take one between here and its use.
    """
    while True:
        port = secrets.randbelow(12000) + 20000
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return str(port)


def run(
    script: str | Path,
    *arguments: object,
    num_ranks: int = 0,
    imports: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | Path = ".",
    timeout: float = 500,
    merged: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run a script and return how it ended, with what it printed.

    Args:
        script: A file of Python, or `-m` or `-c`.
        arguments: Its arguments.
        num_ranks: On how many ranks; 0 is none, where nothing of a launcher is in the environment.
        imports: What it is to find imported beside `IMPORTED`, of what is installed.
        env: Its environment; None for `environment()`.
        cwd: Its folder.
        timeout: Seconds after which it is killed.
        merged: Whether what it prints as errors comes among the rest.

    Raises:
        subprocess.TimeoutExpired: It was killed.
    """
    command = [str(script), *map(str, arguments)]
    env = environment() if env is None else env
    server = _server(env, imports)
    job = {"command": command, "num_ranks": num_ranks, "env": dict(env), "cwd": str(Path(cwd).resolve())}
    with (
        open(os.devnull) as nothing,
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as err,
    ):
        files = [nothing.fileno(), out.fileno(), (out if merged else err).fileno()]
        code = server.run(job, files, timeout)
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read())
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, *printed)
    return subprocess.CompletedProcess(command, code, *printed)


def python(*imports: str) -> str:
    """Return the path of a command `python`, whose processes are forks, and theirs as well.

    It passes signals on, and ends as its fork does; where it is killed, so is that. It is for commands whose own start
    is not what is tested; with options that it does not know, it is Python itself.

    Args:
        imports: What the forks are to find imported beside `IMPORTED`, of what is installed.
    """
    return python_of(_server(os.environ, imports).path)


def main() -> None:
    serves = sys.argv[1] == SERVE
    sys.path.insert(1, str(ROOT))
    for name in (*filter(_is_installed, IMPORTED), *(sys.argv[4:] if serves else [])):
        importlib.import_module(name)
    del sys.path[1]
    collect_rarely()
    share_gloos_thread()
    compile_only_graphs()
    if serves:
        job = Forks(sys.argv[2], int(sys.argv[3])).serve()
        number, command = job["num_ranks"], job["command"]
    else:
        number, command = int(sys.argv[1]), sys.argv[2:]

    def job_itself() -> None:
        if number:
            start(number)
        execute(command)

    end_with(job_itself)


if __name__ == "__main__":
    main()
