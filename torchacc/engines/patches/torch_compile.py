"""What only torch.compile's own modules know: whether it can compile here, and what it has compiled and why.

None of it is imported before something is to be compiled: it takes seconds.
"""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchacc.env import replace_default, set_default

_MOST_ENTRIES = 4096
"""Compilations that are remembered; PyTorch itself remembers the last 64."""
_COMPILE_ID = re.compile(r"^\d+/\d+: ")
"""Dynamo's number of the compilation whose guard has failed."""
_CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
_OLDEST_GPU = (7, 0)
"""The compute capability that Triton needs."""
_LOAD_VECTOR_CODE = """
from ctypes import CDLL
try:
    CDLL({library!r})
except OSError:  # what it needs lies where only PyTorch finds it
    import torch
CDLL("__lib_path__")
"""
"""A program that ends well where the library at `__lib_path__`, which PyTorch fills in, can be loaded."""


@dataclass(frozen=True)
class Recompile:
    """A function that was compiled again."""

    name: str
    where: str
    reason: str
    """The guard that has failed, in Dynamo's words."""
    secs: float

    @property
    def is_of_mode(self) -> bool:
        """Whether it runs in another mode for the first time, as in an evaluation."""
        return "GLOBAL_STATE changed" in self.reason or ".training" in self.reason

    def __str__(self) -> str:
        return f"{self.name} ({self.where}) in {self.secs:.1f} s: {self.reason}"


@dataclass(frozen=True)
class Compiled:
    """What torch.compile has done in this process so far."""

    graphs: int
    secs: float
    """Of forwards and backwards together."""
    read_from_disk: int
    breaks: tuple[str, ...]
    """Where a graph ended before its function did, and why; each place once."""
    recompiles: tuple[Recompile, ...]


def why_it_cannot(device: torch.device) -> str | None:
    """Return what torch.compile's own backend lacks on a device, with what to do about it; None where it lacks nothing.

    Args:
        device: A CPU, a GPU or another accelerator.
    """
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler: install g++, or name one by the environment variable CXX"
        return None
    if importlib.util.find_spec("triton") is None:
        return "triton, which compiles for this device, is not installed: pip install triton"
    if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"this GPU has the compute capability {found}, and Triton needs 7.0 (Volta) or later"
    return None


def prepare() -> None:
    """Patch torch.compile to count what it compiles, and to keep graphs for a second backward (`retain_graph`)."""
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.utils import set_compilation_metrics_limit
    from torch._functorch import config

    # Else a hook that a script gives a module of a compiled unit after its first run would never be called.
    dynamo_config.skip_nnmodule_hook_guards = False
    set_compilation_metrics_limit(_MOST_ENTRIES)
    # With donated buffers a compiled backward writes over what it has read, and raises where it is to run again.
    config.donated_buffer = False
    _try_vector_code_without_import()


def _try_vector_code_without_import() -> None:
    """Patch PyTorch to try each kind of a CPU's vector code in a process that loads its library without an import.

    It tries them when a process first compiles, also where all that is to be compiled is on disk, and importing PyTorch
    anew for each takes seconds. Newer versions do not import it either.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    if "\nimport torch\n" in getattr(VecISA, "_avx_py_load", ""):
        library = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
        VecISA._avx_py_load = _LOAD_VECTOR_CODE.format(library=library)


def is_refusal(error: Exception) -> bool:
    """Return whether an error is torch.compile's own, which it raises before what it has compiled runs."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)


def keep_programs_in(folder: Path) -> Path:
    """Set the folder in which inductor keeps what it compiles, unless the environment names another.

    Returns:
        The folder in which it will.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    if not set_default(_CACHE_DIR, str(folder)):
        replace_default(_CACHE_DIR, default_cache_dir(), str(folder))  # which PyTorch sets when it first asks
    return Path(cache_dir())


def compiled_so_far() -> Compiled:
    """Return what torch.compile has done in this process so far."""
    from torch._dynamo.utils import counters, get_compilation_metrics, graph_break_reasons

    entries: list[Any] = get_compilation_metrics()
    found = {_broken(each): None for each in graph_break_reasons}
    return Compiled(
        graphs=counters["stats"]["unique_graphs"],
        secs=sum(each.duration_us or 0 for each in entries) / 1e6,
        read_from_disk=counters["aot_autograd"]["autograd_cache_hit"] or counters["inductor"]["fxgraph_cache_hit"],
        breaks=tuple(found),
        recompiles=tuple(
            Recompile(
                each.co_name or "a function",
                _place(each.co_filename, each.co_firstlineno),
                _COMPILE_ID.sub("", _in_a_line(each.recompile_reason)),
                (each.duration_us or 0) / 1e6,
            )
            for each in entries
            if each.recompile_reason
        ),
    )


def _broken(reason: Any) -> str:
    """Return the line of the script at which a graph ended, and Dynamo's first line about why."""
    where = ""
    if reason.user_stack:
        frame = reason.user_stack[-1]
        where = f"{_place(frame.filename, frame.lineno)}: "
    return f"{where}{_in_a_line(reason.reason)}"


def _place(path: str | None, line: int | None) -> str:
    return f"{Path(path).name}:{line}" if path else "whose code Dynamo does not name"


def _in_a_line(text: str) -> str:
    """Return the first line with anything in it."""
    return " ".join(next((line for line in text.splitlines() if line.strip()), text).split())
