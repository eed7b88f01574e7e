"""Runs programs of pages, one for each line of input, in forks of this process, which has the libraries imported."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import page_setups
import torch  # noqa: F401  (for the forks)
import transformers  # noqa: F401

import torchacc  # noqa: F401
from tests.forkrun import collect_rarely, free_port
from torchacc.config import Config
from torchacc.train.file import TrainFile

ROOT = Path(__file__).parents[2]
SECONDS_TO_RUN = 480.0  # many times what a program takes; below pytest's own limit
COMMANDS = {
    "python": "",
    "torchrun": "-m torch.distributed.run",
    "torchacc": "-m torchacc",
    "consolidate_and_reshard_fsdp_ckpts": "-m torchacc.cli.consolidate_and_reshard_fsdp_ckpts",
    "consolidate_sharded_model_checkpoints": "-m torchacc.cli.consolidate_sharded_model_checkpoints",
}
PYTHON = os.environ["PYTHON"]  # of forkrun.py
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main() -> None:
    if importlib.util.find_spec("torch_xla"):
        import torch_xla  # noqa: F401  (for the forks; it starts no device)
    collect_rarely()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in requests:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


def run(program: dict[str, Any]) -> str:
    """Run a program in a process for each rank; return what failed, and nothing if nothing did."""
    folder = Path(program["folder"])
    prepare(folder)
    ended, end = os.pipe()  # read by ranks that are done, until all are: a rank that leaves may be one too many
    port, ranks = free_port(), []
    for rank in range(program["num_processes"]):
        pid = os.fork()
        if not pid:
            os.close(end)
            run_rank(program, folder, rank, port, ended)
        ranks.append(pid)
    failed = wait(folder, set(ranks))
    os.close(end)
    os.close(ended)
    for pid in ranks:
        if failed:
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):  # its children, where it has come so far
                os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    outputs = [path.read_text(errors="replace")[-6000:] for path in sorted(folder.glob("*.output"))]
    return "\n".join([failed, *outputs]) if failed else ""


def prepare(folder: Path) -> None:
    """Make the folder that a program runs in, where the repository's own programs are found."""
    here = folder / "here"
    here.mkdir(parents=True)
    for name in ("benchmarks", "examples"):
        (here / name).symlink_to(ROOT / name)
    commands = folder / "bin"
    commands.mkdir()
    for name, words in COMMANDS.items():  # of this checkout, whatever is installed
        (commands / name).write_text(f'#!/bin/sh\nexec "{PYTHON}" {words} "$@"\n')
        (commands / name).chmod(0o755)


def wait(folder: Path, pids: set[int]) -> str:
    """Wait until each rank has said how it ended, or one failed, or died, or time is up."""
    until = time.monotonic() + SECONDS_TO_RUN
    while time.monotonic() < until:
        said = {path.stem: path.read_text() for path in folder.glob("*.ended")}
        bad = [f"process {rank}: {text}" for rank, text in said.items() if text != "ok"]
        if bad or len(said) == len(pids):
            return "\n".join(bad)
        for pid in pids:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None and not (folder / f"{pid}.ended").exists():
                return f"a process died with status {status.si_status}"
        time.sleep(0.02)
    return f"not done after {SECONDS_TO_RUN:.0f} s"


def run_rank(program: dict[str, Any], folder: Path, rank: int, port: int, ended: int) -> None:
    """Run a program's blocks, say how that ended, and leave once all ranks have."""
    os.setsid()
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder / "here")
    count = program["num_processes"]
    if count > 1:
        values = (rank, rank, count, count, "127.0.0.1", port)
        os.environ.update({name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=True)})
    said = "ok"
    try:
        run_blocks(program)
    except BaseException:
        said = traceback.format_exc()
    sys.stdout.flush()
    ending = folder / f"{os.getpid()}.ending"
    ending.write_text(said)
    ending.rename(ending.with_suffix(".ended"))
    os.read(ended, 1)
    os._exit(0)


def run_blocks(program: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for name in program["setups"]:
        namespace.update(page_setups.SETUPS[name]() or {})
    for block in program["blocks"]:
        if block["file"]:
            path = Path(block["file"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["code"], encoding="utf-8")
        elif block["language"] == "bash":
            run_bash(block, program["num_processes"])
        elif block["language"] == "yaml":
            check_yaml(block, namespace)
        else:
            # So many empty lines that a traceback names the page's own.
            code = "\n" * (block["line"] - 1) + block["code"]
            exec(compile(code, block["page"], "exec"), namespace)


def run_bash(block: dict[str, Any], num_processes: int) -> None:
    """Run a command in rank 0 once all ranks are there, while the others wait."""
    rank = int(os.environ.get("RANK", "0"))
    Path(f"../{block['line']}.there-{rank}").touch()
    done = Path(f"../{block['line']}.done")
    while rank and not done.exists():
        time.sleep(0.05)
    if rank:
        return
    while len(list(Path("..").glob(f"{block['line']}.there-*"))) < num_processes:
        time.sleep(0.05)
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    folders = [Path("../bin").resolve(), Path(sys.executable).parent, environment["PATH"]]
    environment["PATH"] = os.pathsep.join(str(folder) for folder in folders)
    environment["XDG_CACHE_HOME"] = str(Path.cwd().parent / "cache")
    subprocess.run(["bash", "-euo", "pipefail", "-c", block["code"]], env=environment, check=True)
    done.touch()


def check_yaml(block: dict[str, Any], namespace: dict[str, Any]) -> None:
    """Read options of a `Config`, which the page's `config` then is, or a training file or a stage of one."""
    path = Path("options.yaml")
    path.write_text(block["code"], encoding="utf-8")
    keys = {line.partition(":")[0] for line in block["code"].splitlines() if line[:1].isalpha()}
    if keys <= Config.model_fields.keys():
        namespace["config"] = Config.from_yaml(path)
        return
    if "training_stages" not in keys:
        indented = "".join(f"    {line}" for line in block["code"].splitlines(keepends=True))
        path.write_text(f"training_stages:\n  stage:\n{indented}", encoding="utf-8")
    TrainFile.read(path)


if __name__ == "__main__":
    main()
