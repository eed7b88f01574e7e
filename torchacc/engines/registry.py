"""Choose the engine: the one place where a backend or an engine is compared by name."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from torchacc.config import Config, resolve
from torchacc.engines.base import Engine
from torchacc.engines.patches import torch_patches
from torchacc.engines.xla import hardware
from torchacc.engines.xla import runtime as xla_runtime
from torchacc.engines.xla.refused_options import refused_option
from torchacc.env import Job
from torchacc.errors import ConfigError, EngineError
from torchacc.logging import get_logger
from torchacc.parallel.axes import Role, axes_with
from torchacc.parallel.mesh import from_config
from torchacc.parallel.plan import ShardingPlan

_log = get_logger(__name__)

ENGINES = {
    "native": "torchacc.engines.native.native_engine:NativeEngine",
    "xla-multiprocess": "torchacc.engines.xla.multiprocess:MultiprocessEngine",
    "xla-spmd": "torchacc.engines.xla.spmd:SpmdEngine",
}
"""Every engine: its name, and where its class is. A class is imported when it is chosen."""

_SURVEY_SECS = 120.0
"""How long an engine may take to find its devices; loading torch_xla alone takes up to 20 s on a busy machine."""

_PROGRAM = "from torchacc.engines import registry; registry.answer({name!r})"


@dataclass(frozen=True)
class Choice:
    """The engine that a config asks for in a job."""

    engine: str
    fallback_reason: str | None = None
    """The option, by its path, for which backend `auto` takes the native engine where it would take XLA; else None."""


_XLA_ONLY: Mapping[str, Callable[[Config], bool]] = {
    "dist.fsdp.use_spmd": lambda config: config.dist.fsdp.use_spmd,
    "compute.scan_layers": lambda config: config.compute.scan_layers,
}
"""What XLA alone can do."""


def choose(config: Config, job: Job) -> Choice:
    """Choose the engine for a config: here, for `accelerate()`, `fsdp()` and the trainer alike.

    Backend `auto` is XLA where torch_xla is installed, PyTorch has no accelerator of its own that torch_xla would leave
    idle (unless PJRT_DEVICE=CUDA asks for it), and the config asks for nothing that the native engine alone can do;
    else it is native. For such an option it leaves no TPU idle: there it is XLA, which refuses it. A backend that the
    config names is the user's choice: its engine refuses what it cannot do.

    Raises:
        ConfigError: It asks for what only different engines can; or XLA is asked for, or chosen, and torch_xla cannot
            load with this torch, or what drives its devices is not installed.
    """
    if config.backend == "native":
        return Choice("native")
    if config.backend == "auto":
        left_idle = torch.accelerator.is_available() and not hardware.is_asked_for_gpu()
        if left_idle or not xla_runtime.is_installed():
            return Choice("native")
        option = _native_only(config)
        of_xla = next((path for path, is_asked in _XLA_ONLY.items() if is_asked(config)), None)
        if option is not None and of_xla is not None:
            raise ConfigError(
                f"{option} is what the native engine alone can do, and {of_xla} what XLA alone can: leave one of them "
                "out, or choose the engine by config.backend = 'native' or 'xla'"
            )
        if option is not None and (xla_runtime.runs_on_cpu() or torch.accelerator.is_available()):
            return Choice("native", fallback_reason=option)
    assert config.backend in ("auto", "xla"), f"nothing says which engine backend {config.backend!r} is"
    xla_runtime.check_versions()
    hardware.check_platform()
    return Choice("xla-multiprocess" if job.launched and not config.dist.fsdp.use_spmd else "xla-spmd")


def _native_only(config: Config) -> str | None:
    """Return the first option that a config asks for and the native engine alone can do."""
    for axis in axes_with(Role.SEQUENCE, Role.EXPERT):
        if getattr(config.dist, axis).size > 1 and not config.dist.fsdp.use_spmd:
            return f"dist.{axis}.size"
    return refused_option(config)


def engine_class(name: str) -> type[Engine]:
    """Return the class of an engine."""
    module, class_name = ENGINES[name].split(":")
    found: type[Engine] = getattr(importlib.import_module(module), class_name)
    return found


def has_effect(config: Config, option: str, job: Job) -> bool:
    """Return whether an option, by its path, means something to the engine that a config asks for."""
    return option not in engine_class(choose(config, job).engine).no_effect


def make_engine(config: Config, job: Job) -> Engine:
    """Resolve a config and make its engine; nothing is started.

    Raises:
        ConfigError: The config contradicts itself or the job.
    """
    choice = choose(config, job)
    if choice.fallback_reason is not None:
        _log.info("config.backend = 'auto' takes the native engine for %s, which XLA has not", choice.fallback_reason)
    chosen = engine_class(choice.engine)
    resolved = resolve(config, job, num_devices=chosen.count_devices(config, job))
    return chosen(config=resolved, mesh=from_config(resolved), job=job)


@dataclass
class _Active:
    engine: Engine | None = None


_active = _Active()


def activate(engine: Engine, plan: ShardingPlan) -> None:
    """Start an engine for a model with this plan, and make it the process's own. Collective: every process."""
    engine.setup(plan)
    if _active.engine is None:
        torch_patches.hold_until_exit(torch_patches.cuda_autocast_is_optional())
    _active.engine = engine


def active_engine() -> Engine | None:
    """Return the engine that this process runs, or None before accelerate()."""
    return _active.engine


@dataclass(frozen=True)
class Finding:
    """Whether one engine can run on this machine."""

    name: str
    devices: str | None
    """What it would run on; None where it cannot run."""
    reason: str | None
    """Why it cannot; None where it can."""


def survey(timeout_secs: float = _SURVEY_SECS) -> list[Finding]:
    """Return the devices that each engine finds.

    Args:
        timeout_secs: How long each may take.
    """
    asked: dict[Callable[[], str], tuple[str | None, str | None]] = {}
    findings = []
    for name in ENGINES:
        engine = engine_class(name)
        try:
            engine.check_devices()
        except ConfigError as error:
            findings.append(Finding(name, None, str(error)))
            continue
        how = engine.find_devices.__func__  # type: ignore[attr-defined]
        if how not in asked:  # engines that share a runtime need to be asked once
            asked[how] = _ask(name, timeout_secs)
        findings.append(Finding(name, *asked[how]))
    return findings


def answer(name: str) -> None:
    """Print what an engine found, as JSON in the last line; run in a process of its own."""
    try:
        found = {"devices": engine_class(name).find_devices(), "reason": None}
    except (ConfigError, EngineError) as error:
        found = {"devices": None, "reason": str(error)}
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def _ask(name: str, timeout_secs: float) -> tuple[str | None, str | None]:
    command = [sys.executable, "-c", _PROGRAM.format(name=name)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_secs, check=False)
    except subprocess.TimeoutExpired:
        return None, f"it found no devices in {timeout_secs:g} s"
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found = json.loads(lines[-1])
        return found["devices"], found["reason"]
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return None, f"its process ended with status {done.returncode}: {last}"
