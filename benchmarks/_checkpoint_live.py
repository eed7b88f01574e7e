"""One rank of `checkpoint.py`'s second part: save and load a live model in turns with plain files and with dcp.

Started by torchrun. Rank 0 prints the times of each case by round as JSON: those of the slowest rank.
"""

import argparse
import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _checkpoint_cases import UNIT_SHAPES
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import torchacc
from torchacc.checkpoint.saver import free_copies

WRITTEN_BY = {"cold plain read": "plain write", "cold load": "save", "cold dcp load": "dcp save"}
RANK = int(os.environ["RANK"])  # noqa: TID251


class Stack(nn.Module):
    """As many linear layers as the rank files have units."""

    def __init__(self, units: int) -> None:
        """Make the layers; their weights are drawn once and shared out."""
        super().__init__()
        rows, columns = UNIT_SHAPES["weight"]
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(columns, rows)) for _ in range(units)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers, each on the part of the columns that it has rows for."""
        for layer in self.layers:
            x = nn.functional.pad(layer(x), (0, x.shape[1] - layer[0].out_features))
        return x.square().mean()


def main() -> None:
    """Take turns, and print what was measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--units", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    config = torchacc.Config.from_dict({"backend": "native", "dist": {"fsdp": {"size": dist_size()}}})
    model = torchacc.accelerate(Stack(args.units), None, config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, UNIT_SHAPES["weight"][1])).backward()
    optimizer.step()
    optimizer.zero_grad()
    cases = Cases(args.folder, model, optimizer)
    found: dict[str, list[float]] = {}
    for index in range(-1, args.rounds):  # the first one warms up
        for names in cases.turns(backwards=index % 2 == 1):
            for name in names:
                secs = slowest(cases.run, name)
                if index >= 0:
                    found.setdefault(name, []).append(secs)
    if RANK == 0:
        sys.stdout.write(json.dumps({"bytes": cases.num_bytes, "secs": found}) + "\n")


def dist_size() -> int:
    """Return the number of ranks."""
    return int(os.environ["WORLD_SIZE"])  # noqa: TID251


def slowest(run: Callable[[str], float], name: str) -> float:
    """Return how long the slowest rank took."""
    dist.barrier()
    secs = torch.tensor(run(name), dtype=torch.float64)
    dist.all_reduce(secs, dist.ReduceOp.MAX)
    return float(secs)


class Cases:
    """What is measured; each writes the same tensors, and each reads what it wrote itself."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Note what there is to save."""
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        moments = [value for entry in optimizer.state.values() for value in entry.values()]
        self.local = [getattr(tensor, "_local_tensor", tensor) for tensor in (*model.parameters(), *moments)]
        total = torch.tensor(sum(tensor.nbytes for tensor in self.local))
        dist.all_reduce(total)
        self.num_bytes = int(total)
        self.kept = [torch.empty_like(tensor) for tensor in self.local]
        self.num_parameters = len(list(model.parameters()))
        self._new: Any = None
        """What the last case has put into new memory: freed when the next one begins, which takes no one's time."""

    def turns(self, *, backwards: bool) -> list[tuple[str, ...]]:
        """Return the cases: what saves, and what then loads that."""
        turns = [
            ("plain write", "plain read", "cold plain read", "plain reread"),
            ("save", "load", "cold load", "reload"),
            ("dcp save", "dcp load", "cold dcp load"),
            ("first async save", "write", "async save", "write"),
        ]
        return turns[::-1] if backwards else turns

    def run(self, name: str) -> float:
        """Run one case and return its seconds.

        One that writes runs twice, and the second time counts: it then finds memory for its pages that the system has
        at hand. What it has not had in use for a while a virtual machine asks its host for, which can take longer than
        the writing, and falls to whichever case comes first.
        """
        if name.endswith(("plain write", "save")):
            self._make_room(name)
            self._carry_out(name)
            if name.endswith("async save"):
                self._write()
            self._make_room(name)
            if name == "first async save":
                free_copies(self.model)
                self._give_back_memory()
        elif name.endswith(("read", "load")):
            if name.startswith("cold"):
                self._forget_cached(self.folder / WRITTEN_BY[name])
            self._give_back_memory()
            dist.barrier()
        started = time.perf_counter()
        self._carry_out(name)
        return time.perf_counter() - started

    def _carry_out(self, name: str) -> None:
        method = name.removeprefix("cold ").removeprefix("first ").replace(" ", "_")
        getattr(self, f"_{method}")()

    def _make_room(self, name: str) -> None:
        """Remove what a case has written before."""
        dist.barrier()
        if RANK == 0:
            shutil.rmtree(self.folder / name.removeprefix("first "), ignore_errors=True)
        os.sync()
        dist.barrier()

    @staticmethod
    def _forget_cached(folder: Path) -> None:
        """Let the system read a folder's files from the disk again."""
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _give_back_memory(self) -> None:
        """Free what the last case has loaded, and give it back to the system, as a new process has none of it."""
        self._new = None
        ctypes.CDLL(None).malloc_trim(0)

    @property
    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def _plain_write(self) -> None:
        path = self.folder / "plain write"
        path.mkdir(exist_ok=True)
        with (path / f"{RANK}").open("wb", buffering=0) as file:
            for tensor in self.local:
                data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                while data:
                    data = data[file.write(data) :]
            os.fsync(file.fileno())
        dist.barrier()

    def _plain_read(self) -> None:
        in_use, absent = self.kept[: self.num_parameters], self.kept[self.num_parameters :]
        self._new = [torch.empty_like(tensor) for tensor in absent]
        self._read_plain_into([*in_use, *self._new])

    def _plain_reread(self) -> None:
        self._read_plain_into(self.kept)

    def _read_plain_into(self, tensors: list[torch.Tensor]) -> None:
        with (self.folder / "plain write" / f"{RANK}").open("rb", buffering=0) as file:
            for tensor in tensors:
                data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                while data:
                    data = data[file.readinto(data) :]
        dist.barrier()

    def _save(self) -> None:
        torchacc.checkpoint.save(self.folder / "save", **self._parts)

    def _load(self) -> None:
        torchacc.checkpoint.load(self.folder / "save", model=self.model, optimizer=self._new_optimizer())

    def _reload(self) -> None:
        torchacc.checkpoint.load(self.folder / "save", **self._parts)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer without state, as there is one where a run goes on in a new process."""
        self._new = torch.optim.AdamW(self.model.parameters())
        return self._new

    def _dcp_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(self.model, optimizer)
        return {"model": of_model, "optim": of_optimizer}

    def _dcp_save(self) -> None:
        dcp.save(self._dcp_state(self.optimizer), checkpoint_id=self.folder / "dcp save")

    def _dcp_load(self) -> None:
        dcp.load(self._dcp_state(self._new_optimizer()), checkpoint_id=self.folder / "dcp save")  # in place

    def _async_save(self) -> None:
        self._pending = torchacc.checkpoint.snapshot(self.folder / "async save", **self._parts)

    def _write(self) -> None:
        self._pending.write()


if __name__ == "__main__":
    main()
