"""How workers of the contract run, in which environment, and what came of their cases."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import forkrun, gpus

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("contract_worker.py")
FULL_CONTRACT = "TORCHACC_TEST_FULL_CONTRACT"
"""The variable that tells workers of `--full-contract`."""
SECONDS_TO_RUN = 1200  # many times what an engine's cases take on two cores that do nothing else


def environment(*xla_flags: str, **variables: str) -> dict[str, str]:
    """Return the variables, with this checkout and no network, and with more flags of XLA's.

    A process forgets old programs: each takes mappings of memory, of which a process may have 65,530.
    """
    flags = " ".join([os.environ["XLA_FLAGS"], *xla_flags])
    chosen = {"XLA_FLAGS": flags, "XLA_COMPILATION_CACHE_SIZE": "128"}
    return forkrun.environment(**chosen, **variables)


def run_all(
    worker: Path,
    *arguments: object,
    num_ranks: int = 0,
    imports: Sequence[str] = (),
    seconds: float,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a worker to its end, or until its time is up; return what it printed."""
    try:
        return forkrun.run(
            worker,
            *arguments,
            num_ranks=num_ranks,
            imports=imports,
            env=env or environment(),
            timeout=seconds,
            merged=True,
        ).stdout
    except subprocess.TimeoutExpired as late:
        return f"{late.output}\n(ended after {seconds} s)"


@dataclass(frozen=True)
class Launch:
    """What came of the cases of an engine."""

    engine: str
    num_ranks: int
    outcomes: Mapping[str, Sequence[Mapping[str, Any]]]
    """How each case ended, by name and rank."""
    printed: str

    def returned(self, name: str) -> Any:
        """Return what a case did on rank 0; fail the test where it failed on any."""
        ended = self.outcomes.get(name, [])
        failures = [f"rank {rank}: {each['failed']}" for rank, each in enumerate(ended) if each["failed"]]
        assert not failures, "\n".join(failures)
        unfinished = f"{self.engine} did not come as far as {name}; it printed:\n{self.printed[-6000:]}"
        assert len(ended) == self.num_ranks, unfinished
        return ended[0]["returned"]


def launch(engine: str, out: Path, names: Sequence[str], *, dumps: bool = False) -> Launch:
    """Run cases on an engine.

    Args:
        engine: Its kind and its number of devices, such as `native-2`, or `native-gpu-2`.
        out: A folder for what they came to.
        names: The cases.
        dumps: Whether XLA writes the programs that it compiles, into the folder that the worker finds in
            `TORCHACC_TEST_PROGRAMS`.
    """
    out.mkdir()
    kind, _, number = engine.rpartition("-")
    is_launched = kind in ("xla-multiprocess", "native-gpu") or (kind == "native" and number != "1")
    num_ranks = int(number) if is_launched else 0
    env = environment(TORCHINDUCTOR_CACHE_DIR=str(out / "inductor"))
    if dumps:
        programs = out / "programs"
        dump = f"--xla_dump_to={programs} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*SyncTensors.*"
        env = environment(dump, TORCHACC_TEST_PROGRAMS=str(programs))
    left, printed, outcomes = list(names), "", {}
    for _ in range(1 + _MORE_LAUNCHES):
        printed += _run_cases(kind, num_ranks, env, engine, out, *left)
        outcomes = _outcomes_in(out)
        before, left = left, [name for name in left if len(outcomes.get(name, [])) < (num_ranks or 1)]
        if not left or len(left) == len(before):
            break
    return Launch(engine, num_ranks or 1, outcomes, printed)


_MORE_LAUNCHES = 3
"""How often the cases that an engine did not come to, because one before them had failed, are launched again."""


def _run_cases(kind: str, num_ranks: int, env: Mapping[str, str], *arguments: object) -> str:
    if kind.endswith("-gpu"):
        return launch_on_gpus(num_ranks or 1, WORKER, *arguments, under_xla=not num_ranks)
    imports = ["torch_xla"] if kind.startswith("xla") else []
    return run_all(WORKER, *arguments, num_ranks=num_ranks, imports=imports, seconds=SECONDS_TO_RUN, env=env)


def _outcomes_in(out: Path) -> dict[str, list[dict[str, Any]]]:
    outcomes: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(out.glob("*.pt")):  # <case>.<rank>.pt
        outcomes.setdefault(file.stem.rpartition(".")[0], []).append(torch.load(file, weights_only=True))
    return outcomes


def launch_on_gpus(num_ranks: int, worker: Path, *arguments: object, under_xla: bool = False) -> str:
    """Run a worker on GPUs, to which it says `gpus.join()`, and return what it printed.

    Not as forks: where a process has looked for GPUs, its forks cannot use them.
    """
    show = gpus.under_xla if under_xla else gpus.shown
    env = show(forkrun.environment(**{gpus.SWITCH: gpus.kind() or ""}))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    process = subprocess.Popen(
        [sys.executable, *launcher, *map(str, [worker, *arguments])],
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        return process.communicate(timeout=SECONDS_TO_RUN)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.communicate()[0] + f"\n(ended after {SECONDS_TO_RUN} s)"
    finally:  # of an interrupted session, too; the launcher ends its processes
        process.terminate()
