"""Run a compiler for accelerators in a process of its own, and keep what it made."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchacc import env
from torchacc.aot.scheduled_program import ScheduledProgram, parse
from torchacc.aot.topologies import Topology
from torchacc.engines.xla import cuda, tpu
from torchacc.engines.xla.recording import Program
from torchacc.errors import ConfigError, EngineError

_WORKER = Path(__file__).with_name("compile_deviceless.py")
_PLUGIN = cuda.KNOWN_PAIRS["2.9"]
VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no machine of Google's is asked what it is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # else two compilers wait for each other at a file
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Of a process that loads libtpu where no TPU is."""
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_LINES_OF_MEMORY = 25
"""Of the compiler's list: what is used, and three lines for each of eight allocations."""


@dataclass(frozen=True)
class _Compiler:
    """What compiles for the devices of a platform."""

    name: str
    extra: str
    """Of torchacc, which installs it."""
    packages: tuple[str, ...]
    variables: Callable[[Topology], Mapping[str, str]]
    """Those of the environment by which it takes flags, as in a run."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Further ones."""


def _variables_of_tpus(topology: Topology) -> dict[str, str]:
    return {"LIBTPU_INIT_ARGS": tpu.flags_of_run(topology.chip.name)}


def _variables_of_gpus(topology: Topology) -> dict[str, str]:
    """Return what the user has chosen for programs on GPUs; the other flags are of this machine's CPU."""
    flags = (env.get("XLA_FLAGS") or "").split()
    return {"XLA_FLAGS": " ".join(each for each in flags if each.startswith("--xla_gpu_"))}


_COMPILERS: Mapping[str, _Compiler] = {
    tpu.PLATFORM: _Compiler("the compiler of TPUs", "plan-tpu", ("jax", "jaxlib", "libtpu"), _variables_of_tpus),
    cuda.PLATFORM: _Compiler(
        "XLA's compiler of NVIDIA GPUs",
        "plan-cuda",
        ("jax", "jaxlib", _PLUGIN.wheel),
        _variables_of_gpus,
        {"xla_gpu_autotune_level": 0},  # there is no GPU on which candidates could be timed
    ),
}


@dataclass(frozen=True)
class CompiledStep:
    """What a compiler says of a program on each device."""

    seconds: float
    """That it took when it was compiled."""
    device_kind: str
    versions: dict[str, str]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of outputs that take the memory of arguments."""
    temp_bytes: int
    flops: float
    """A loop's body counted as often as it runs."""
    bytes_accessed: float
    """To and from the device's memory; a loop's body counted as often as it runs."""
    text: str
    """Of the optimized program."""

    @property
    def peak_bytes(self) -> int:
        """What the device holds at most."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def program(self) -> ScheduledProgram:
        """Return the program in the order in which it runs."""
        return parse(self.text)


class OutOfMemoryError(EngineError):
    """The compiler has found that the program needs more memory than a device has."""


def compile_program(program: Program, topology: Topology, waited: Callable[[float], None]) -> CompiledStep:
    """Compile a program, unless it was compiled by the same versions before.

    Args:
        program: For as many devices as the topology has.
        topology: What it is compiled for.
        waited: Called each second with the seconds since the compiler began.

    Raises:
        ConfigError: The compiler is not installed.
        OutOfMemoryError: The program needs more memory than a device has; the message lists its largest allocations.
        EngineError: The compiler has failed.
    """
    compiler = _COMPILERS[topology.chip.platform]
    request = {
        "platform": topology.chip.platform,
        "topology": topology.name,
        "topology_options": topology.options,
        "num_devices": topology.num_devices,
        "places": topology.places_on(program.axes),
        "plugin": [_PLUGIN.wheel, _PLUGIN.library],
        "flags": dict(compiler.flags),
        "variables": {"XLA_FLAGS": "", **compiler.variables(topology)},
        "kept": "with the number of characters",  # what was kept before is not read
        "inputs": [asdict(each) for each in program.inputs],
        "versions": _installed(topology.chip.platform),
    }
    about = json.dumps(request, sort_keys=True).encode()
    kept = cache_folder() / hashlib.sha256(program.hlo + about).hexdigest()[:32]
    found = _read(kept)
    if found is None:
        _compile_into(kept, program, request, waited)
        found = _read(kept)
    if found is None:
        raise EngineError(f"what was compiled for {topology.name} is no longer in {kept}: compile it again")
    return found


def _read(kept: Path) -> CompiledStep | None:
    """Return what was compiled into a folder; None where it is not there, or not whole.

    Raises:
        OutOfMemoryError: The compiler has found that there is no memory for it.
    """
    try:
        found = json.loads((kept / "compiled.json").read_text())
        text = "" if "error" in found else (kept / "optimized.txt").read_text()
    except (OSError, ValueError):
        return None
    if "error" in found:
        raise OutOfMemoryError(found["error"])
    if len(text) != found.pop("num_characters"):
        return None
    memory = {name.removesuffix("_size_in_bytes") + "_bytes": size for name, size in found.pop("memory").items()}
    return CompiledStep(**found, **memory, text=text)


def cache_folder() -> Path:
    """Return where compiled programs are kept; they may be deleted at any time."""
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torchacc" / "compiled"


def check_installed(platform: str) -> None:
    """Check that there is a compiler for a platform's devices, without importing it.

    Args:
        platform: Of a chip.

    Raises:
        ConfigError: There is none.
    """
    _installed(platform)


def _installed(platform: str) -> dict[str, str]:
    compiler = _COMPILERS[platform]
    try:
        return {name: version(name) for name in compiler.packages}
    except PackageNotFoundError as error:
        raise ConfigError(
            f"--compile-for needs {compiler.name}, and {error.name} is not installed: "
            f"`pip install 'torchacc[{compiler.extra}]'`"
        ) from None


def _compile_into(kept: Path, program: Program, request: dict[str, Any], waited: Callable[[float], None]) -> None:
    """Compile in a folder beside `kept`, which is there at once, or not at all."""
    with _exiting_on_sigterm(), _new_folder(kept.parent) as name:
        folder = Path(name)
        (folder / "program.pb").write_bytes(program.hlo)
        (folder / "request.json").write_text(json.dumps(request))
        variables = {**VARIABLES, **request["variables"]}
        status, printed = _run([sys.executable, "-I", str(_WORKER), name], folder, variables, waited)
        if status and _OUT_OF_MEMORY in printed:
            (folder / "compiled.json").write_text(json.dumps({"error": _explain_memory(printed)}))
        elif status:
            raise EngineError(_failed(status, printed, request["topology"]))
        (folder / "program.pb").unlink()
        os.chmod(folder, 0o755)
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
        folder.mkdir()  # which TemporaryDirectory is to find


def _new_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=parent, prefix="compiling-")
    except OSError as error:
        raise ConfigError(
            f"compiled programs are kept in {parent}, which cannot be written: {error}; set XDG_CACHE_HOME to a folder "
            "that can"
        ) from None


def _run(
    command: list[str], folder: Path, variables: Mapping[str, str], waited: Callable[[float], None]
) -> tuple[int, str]:
    """Run a command in a session of its own, which ends with this process's call."""
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env.with_variables(variables),
        )
    began = time.monotonic()
    try:
        while True:
            try:
                status = process.wait(timeout=1)
                break
            except subprocess.TimeoutExpired:
                waited(time.monotonic() - began)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, output.read_text(errors="replace")


@contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """Context manager in which SIGTERM ends this process as an error does, so that nothing of it stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failed(status: int, printed: str, topology: str) -> str:
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "it printed nothing")
    if status == -signal.SIGKILL:
        return (
            f"the compiler for {topology} was killed, as the system does where its memory is spent: compile a smaller "
            "model, or fewer layers by config.compute.scan_layers"
        )
    return f"the compiler for {topology} ended with status {status}: {last[:500]}"


def _explain_memory(printed: str) -> str:
    """Return the compiler's own words of what it has no memory for, from the line that says so."""
    lines = printed[printed.index(_OUT_OF_MEMORY) :].splitlines()
    wanted = ("Operator:", "Shape:", "Size:", "Used")
    told = [line.strip() for line in lines if line.strip() and any(word in line for word in wanted)]
    return "\n  ".join(["the step does not fit a device, as its compiler says:", *told[:_LINES_OF_MEMORY]])
