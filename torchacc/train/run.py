"""What the training commands do: decide about a run, start its processes, and execute it in each of them."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchacc import env
from torchacc.engines.xla import runtime
from torchacc.env import Job
from torchacc.errors import ConfigError, shown
from torchacc.launch import LaunchOptions
from torchacc.launch import run as launch
from torchacc.launch.options import check as check_launch
from torchacc.logging import get_logger
from torchacc.train.file import TrainFile
from torchacc.train.log_files import log_files
from torchacc.train.run_folder import check_folder, lock_folder, take_folder
from torchacc.train.stage import StageRequest, StageRun, resolve_stage

if TYPE_CHECKING:
    from torch import nn

    from torchacc.train.stage_trainer import StageTrainer

_log = get_logger(__name__)

_MAX_DIGITS = 18
_MODULE = ("-m", "torchacc.train")


@dataclass(frozen=True)
class Start:
    """How this machine's processes are started. What is None comes from the environment, on several machines."""

    node_rank: int | None = None
    """Which of the machines this is."""
    master_addr: str | None = None
    """Address of the first."""
    master_port: int | None = None
    """A free port there."""
    max_restarts: int = 0
    """How often a run that failed is started again, from its newest checkpoint."""
    heartbeat_secs: float | None = None
    """Seconds without progress after which a run hangs; None for ever."""

    @property
    def is_watched(self) -> bool:
        """Whether a launcher is needed to watch the processes, even for one."""
        return self.max_restarts > 0 or self.heartbeat_secs is not None


def train_production_mode(
    model_config_key: str | None = None,
    stage: str | None = None,
    devices: int | None = None,
    precision: str | int | None = None,
    config: str | Path = "config.yaml",
) -> tuple["StageTrainer", "nn.Module"]:
    """Train one stage in this process, or in all processes that a launcher has started. Collective.

    Args:
        model_config_key: Name of the model config; None for the one that the stage names.
        stage: Name of the stage; None for the first stage in the file.
        devices: Number of devices of each machine, if the file does not set it.
        precision: `bf16-mixed`, `32-true` and so on; None for the precision in the file.
        config: Path of the training file.

    Returns:
        The trainer and the trained model, which is sharded.

    Raises:
        ConfigError: The file or an argument is wrong, or the stage needs more processes than were started.
    """
    # What a scheduler has started several times is the script itself; of the command it is one for each machine.
    launched = read_launched() if env.scheduler() is None else env.read_job()
    request = StageRequest(model=model_config_key, stage=stage, default_devices=devices, precision=precision)
    run = resolve_stage(_read(config), request, launched)
    if not _is_ready(run, launched):
        raise ConfigError(
            f"stage {run.stage!r} has {run.layout.num_devices} devices, and engine {run.layout.engine} a process for "
            f"each: start the script with `torchacc launch --nproc {run.layout.num_processes} your_script.py`, or use "
            "the command `torchacc train`, which starts them itself"
        )
    return _execute(run, launched)


def train(
    config: Path,
    request: StageRequest,
    start: Start,
    arguments: Sequence[str],
    *,
    dry_run: bool = False,
    overwrite: bool = False,
) -> int:
    """Train a stage, starting this machine's processes where it needs several.

    Args:
        config: The training file.
        request: What is asked for beside it.
        start: How this machine's processes are started.
        arguments: Those of the command, for the processes.
        dry_run: Whether to print what would be done instead.
        overwrite: Whether to remove what an earlier run has left in the stage's folder, once this one can train.

    Returns:
        The exit status.

    Raises:
        ConfigError: Something is wrong; nothing has been started, and nothing removed.
    """
    launched = read_launched()
    run = resolve_stage(_read(config), request, launched)
    command = [*_MODULE, *arguments]
    launch_options = None
    if launched is None and (run.layout.num_nodes == 1 or not dry_run):  # a plan may be read anywhere
        launch_options = _launch_options(run, start)
        check_launch(command, launch_options)
    if dry_run:
        sys.stdout.write(f"{run}\n")
        check_folder(run, overwrite=overwrite)
        return 0
    if launched is not None and (overwrite or start.is_watched):
        raise ConfigError(
            "--overwrite, --max-restarts and --heartbeat-secs are for what starts the processes, and a launcher "
            f"has started this one: remove {run.folder} yourself, hand the others to the launcher, or leave it out"
        )
    if _is_ready(run, launched) and not start.is_watched:
        _execute(run, launched, overwrite=overwrite)
        return 0
    assert launch_options is not None  # what a launcher has started is executed above
    if launch_options.node_rank == 0:
        take_folder(run, overwrite=overwrite)
    return launch(command, launch_options)


def read_launched() -> Job | None:
    """Return the processes that a launcher has started, of which this is one; None where none has.

    RANK and WORLD_SIZE alone were set by hand, and are about machines.
    """
    return None if env.get("LOCAL_WORLD_SIZE") is None else env.read_job()


def _read(config: str | Path) -> TrainFile:
    runtime.prepare_import()  # transformers does, by way of accelerate
    return TrainFile.read(config)


def _is_ready(run: StageRun, launched: Job | None) -> bool:
    """Return whether the processes of a run are there."""
    if launched is not None:
        return True
    # Variables that were set by hand would be taken for a launcher's.
    return run.layout.num_nodes == run.layout.num_processes == 1 and not env.read_job().launched


def _execute(run: StageRun, launched: Job | None, *, overwrite: bool = False) -> tuple["StageTrainer", "nn.Module"]:
    from torchacc.train.stage_trainer import StageTrainer

    rank = 0 if launched is None else launched.rank
    with ExitStack() as stack:
        if rank == 0:
            take_folder(run, overwrite=overwrite)
            stack.enter_context(lock_folder(run.folder))
        stack.enter_context(log_files(run.folder, run.logging, rank=rank))
        if rank == 0:
            for note in run.notes:
                _log.info(note)
        trainer = StageTrainer(run)
        trainer.fit()
        return trainer, trainer.model


def _launch_options(run: StageRun, start: Start) -> LaunchOptions:
    """Return how to start this machine's processes, by the options and the variables that are set by hand."""
    env.refuse_several_launchers("torchacc train")
    num_nodes, num_devices = run.layout.num_nodes, run.layout.num_devices
    rank, size = _number("RANK", start.node_rank), _number("WORLD_SIZE", None)
    if size not in (None, num_nodes, num_devices):
        raise ConfigError(
            f"WORLD_SIZE={size} is set, and the run has {num_devices} devices on {num_nodes} machines: unset it, or "
            "pass --num-nodes and --devices that fit"
        )
    if _number("LOCAL_RANK", None):
        raise ConfigError(
            f"LOCAL_RANK={env.get('LOCAL_RANK')} is set: run the command once on each machine, with LOCAL_RANK=0 or "
            f"without it; it starts the {run.layout.num_processes} processes itself"
        )
    watched = LaunchOptions(
        num_processes=run.layout.num_processes,
        max_restarts=start.max_restarts,
        heartbeat_secs=start.heartbeat_secs,
    )
    if num_nodes == 1:
        return replace(watched, node_rank=start.node_rank or 0, master_port=start.master_port)
    if rank is None or not 0 <= rank < num_nodes:
        raise ConfigError(
            f"which of the {num_nodes} machines this is, from 0 to {num_nodes - 1}, is said by --node-rank, or by the "
            f"variable RANK, {'which is not set' if rank is None else f'and is {rank}'}"
        )
    return replace(
        watched,
        num_nodes=num_nodes,
        node_rank=rank,
        master_addr=start.master_addr or env.get("MASTER_ADDR"),
        master_port=_number("MASTER_PORT", start.master_port),
    )


def _number(variable: str, given: int | None) -> int | None:
    """Return what is given, else a variable's value, where there is one."""
    text = env.get(variable)
    if given is not None or not text:
        return given
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise ConfigError(f"the environment variable {variable}={shown(text)} is not a whole number")
    return int(text)


def as_arguments(options: dict[str, Any]) -> list[str]:
    """Return options as they stand on a command line; those that are None are left out."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
