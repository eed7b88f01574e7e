"""Say which files of the package four calls walk through, in the order in which each is first entered.

python -m benchmarks walks [--root PATH] [--files]   # PATH: another checkout

Each walk is made in processes of its own, and Python's profiler notes every function of the package that runs in them,
in all threads. What runs only because a module is loaded does not count. A line says how many files there are, how many
functions, and how many files the deepest call goes through, which `--files` marks by a star.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torchacc"
ENGINES = {"native": 2, "xla-multiprocess": 2, "xla-spmd": 1}
"""Each engine, and its processes here; all of them shard over two devices."""
TRAINER = "trainer"
WALKS = {
    "shard": "fsdp.size to the shards of a model",
    "batch": "a batch of the loader to the devices",
    "checkpoint": "manager.save() to the disk, and manager.restore() back",
    "step": "a line of YAML to an optimizer's step",
}
_TRIED = 2
"""Parameters with which the trainer tries an optimizer's options before it trains."""
STAGE = """
output_dir: {folder}/runs
training_stages:
  only:
    model_config: model_config_tiny
    data: {{dataset: text, files: {folder}/*.txt, vocab_size: 300, block_size: 8, cache_dir: {folder}/cache}}
    training: {{max_steps: 1, batch_size: 1, save_every_steps: null}}
    distributed: {{devices: 1, engine: native}}
model_config_tiny: {{model_type: gpt2, n_layer: 1, n_head: 2, n_embd: 8, n_positions: 8}}
"""


class Walk:
    """Notes which functions of a package run while it is recorded."""

    def __init__(self, package: Path) -> None:
        """Note nothing yet.

        Args:
            package: The package's folder.
        """
        self._package = package
        self.functions: dict[CodeType, str | None] = {}
        """Each function that was entered, and its file in the package; None for what is not to be counted."""
        self.deepest: list[str] = []
        """The files of calls within calls, from the outermost one: the most that there were at once."""

    def files(self) -> list[str]:
        """Return the files of the package in the order in which they were entered."""
        return list(dict.fromkeys(path for path in self.functions.values() if path is not None))

    def summary(self) -> dict[str, Any]:
        """Return what there is to say of it, as plain data."""
        count = sum(path is not None for path in self.functions.values())
        return {"files": self.files(), "functions": count, "deepest": self.deepest}

    def start(self) -> None:
        """Begin to note, in this thread and in those that start from now on."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        """End it."""
        threading.setprofile(None)
        sys.setprofile(None)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context manager that is noted."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code not in self.functions:
            path = self._path_of(frame)
            if path is None or not self._is_loading(frame):
                self.functions[frame.f_code] = path
                self.deepest = max(self.deepest, self._open_files(frame) if path is not None else [], key=len)

    def _open_files(self, frame: FrameType | None) -> list[str]:
        found: dict[str, None] = {}
        while frame is not None:
            path = self._path_of(frame)
            found |= {path: None} if path is not None else {}
            frame = frame.f_back
        return list(reversed(found))

    def _path_of(self, frame: FrameType) -> str | None:
        file = Path(frame.f_code.co_filename)
        return file.relative_to(self._package.parent).as_posix() if file.is_relative_to(self._package) else None

    def _is_loading(self, frame: FrameType | None) -> bool:
        """Return whether a function runs because a module of the package is loaded."""
        while frame is not None:
            if frame.f_code.co_name == "<module>" and self._path_of(frame) is not None:
                return True
            frame = frame.f_back
        return False


def _package() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, PACKAGE
    return Path(str(spec.origin)).parent


def walk_with(engine: str, folder: Path) -> dict[str, Any]:
    """Shard a model with one engine, ask for a batch, save and restore, and return the walks."""
    import torch
    from torch.utils.data import DataLoader

    import torchacc
    from torchacc.checkpoint import CheckpointManager

    config = torchacc.Config(backend="native" if engine == "native" else "xla")
    config.dist.fsdp.size = 2
    config.dist.fsdp.use_spmd = engine == "xla-spmd"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    walks = {name: Walk(_package()) for name in ("shard", "batch", "checkpoint")}
    with walks["shard"].recorded():
        model = torchacc.accelerate(model, config=config)
    loader = torchacc.shard_loader(DataLoader(torch.ones(8, 4), batch_size=2), model)
    with walks["batch"].recorded():
        batch = next(iter(loader))
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).mean().backward()
    optimizer.step()
    torchacc.sync()
    manager = CheckpointManager(folder / "run", model=model, optimizer=optimizer, loader=loader)
    with manager, walks["checkpoint"].recorded():
        manager.save(1)
        manager.restore()
    return {name: walk.summary() for name, walk in walks.items()}


def walk_of_trainer(folder: Path) -> dict[str, Any]:
    """Train for one step by the command, and return the walk up to the end of the optimizer's step."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from torchacc.cli.main import main as command

    (folder / "text.txt").write_text("One line of text, and another one.\n" * 40, encoding="utf-8")
    (folder / "config.yaml").write_text(STAGE.format(folder=folder), encoding="utf-8")
    walk = Walk(_package())

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if len(optimizer.param_groups[0]["params"]) > _TRIED:
            walk.stop()

    register_optimizer_step_post_hook(stepped)
    with walk.recorded():
        status = command(["train", "--config", str(folder / "config.yaml")])
    assert not status, status
    return {"step": walk.summary()}


def make(subject: str, root: Path) -> dict[str, Any]:
    """Make the walks of an engine, or of the trainer, in processes that import the package of a checkout."""
    with tempfile.TemporaryDirectory(prefix="walks_") as scratch:
        answer = Path(scratch) / "answer.json"
        program = [str(Path(__file__).resolve()), "--make", subject, str(answer)]
        if ENGINES.get(subject, 1) > 1:
            program = ["-m", "torch.distributed.run", f"--nproc-per-node={ENGINES[subject]}", *program]
        environment = {**os.environ, "PYTHONPATH": str(root), "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}  # noqa: TID251
        environment |= {"CPU_NUM_DEVICES": "2"} if subject == "xla-spmd" else {}
        done = subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, cwd=scratch)
        if not answer.exists():
            raise RuntimeError(f"{subject}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(answer.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def describe(walks: dict[str, dict[str, Any]], *, files: bool) -> Iterator[str]:
    """Yield a line for each walk, and where asked for the files below it."""
    for name, title in WALKS.items():
        yield title
        for subject, found in walks.items():
            if name in found:
                walk = found[name]
                deepest = f"{len(walk['deepest'])} files in one another"
                yield f"    {subject:<17} {len(walk['files']):3} files  {walk['functions']:4} functions  {deepest}"
                yield from (
                    f"        {'*' if path in walk['deepest'] else ' '} {path}" for path in walk["files"] if files
                )


def main(argv: list[str] | None = None) -> int:
    """Make all walks in a checkout, and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks walks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, metavar="PATH", help="the checkout (default: this one)")
    parser.add_argument("--files", action="store_true", help="list the files of each walk, too")
    parser.add_argument("--make", nargs=2, metavar=("SUBJECT", "ANSWER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.make is not None:
        subject, answer = args.make[0], Path(args.make[1])
        found = walk_of_trainer(answer.parent) if subject == TRAINER else walk_with(subject, answer.parent)
        if os.environ.get("RANK", "0") == "0":  # noqa: TID251
            answer.write_text(json.dumps(found), encoding="utf-8")
        return 0
    if not (args.root / PACKAGE).is_dir():
        parser.error(f"{args.root} has no folder {PACKAGE}/")
    walks = {subject: make(subject, args.root.resolve()) for subject in (*ENGINES, TRAINER)}
    sys.stdout.write("\n".join(describe(walks, files=args.files)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
