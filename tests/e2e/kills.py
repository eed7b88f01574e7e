"""Kill jobs at random moments while they save, restore, consolidate and convert, and look at what that leaves.

    python tests/e2e/kills.py native 500 --log kills.jsonl   # or xla-spmd, xla-multiprocess, consolidate, convert
    python tests/e2e/kills.py summary --log kills.jsonl      # tried, lost, torn and resumed bit for bit

Each attempt is forked from this process, which has imported everything and started nothing. A job of training goes on
from the newest checkpoint, saves after each step, synchronously or in the background, and gets `kill -9`: one rank or
all, at any moment of its start or of its saves. The next attempt is both the check and the next victim: what it
restores must be no older than what its predecessor was told to be saved, and weights, optimizer and every loss must be
those of a run that nobody has disturbed, bit for bit. A conversion must leave what it reads as it was, and what it
writes whole or not at all; the next one clears away what is left and writes the same bytes as an undisturbed one.

Kills are appended to the log, one a line, so that the runs of several days add up.
"""

import argparse
import json
import logging
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fault_worker import Attempt, build, import_everything

NUM_DEVICES = 2
KEEP = 2
STEPS_OF_A_ROUND = 240
"""After so many steps a run begins anew, in an empty folder."""
SAVES_OF_AN_ATTEMPT = 6
SURVIVORS_SECS = 0.15
"""How long at most a launcher leaves the other processes when one has died."""
JOBS = ("native", "xla-spmd", "xla-multiprocess")
CONVERSIONS = ("consolidate", "convert")

Tell = Callable[..., None]


# What is killed


def train(tell: Tell, *, kind: str, folder: str | None, until: int, async_save: bool = False) -> None:
    """Train from the newest checkpoint on, save after each step, and tell of all."""
    import torchacc

    tell("begun")
    model, loader, optimizer = build(kind, NUM_DEVICES)
    parts = {"model": model, "optimizer": optimizer}
    manager, step = None, 0
    if folder is not None:
        manager = torchacc.checkpoint.CheckpointManager(
            folder, **parts, loader=loader, keep=KEEP, async_save=async_save
        )
        restored = manager.restore()
        step = restored.step if restored else 0
        tell("restored", step=step, digest=digest_of(**parts) if step else None)
    while step < until:
        for (x,) in loader:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            tell("step", step=step, loss=loss.item().hex(), digest=None if manager else digest_of(**parts))
            if manager is not None:
                manager.wait()
                tell("saved", step=step - 1)  # in the background
                tell("saving", step=step)
                manager.save(step)
                if not async_save:
                    tell("saved", step=step)
            if step == until:
                break
    if manager is not None:
        manager.close()
        tell("saved", step=step)


def digest_of(model: Any, optimizer: Any) -> str:
    """Return a checksum of all that this process holds of the weights and of the optimizer's state."""
    import xxhash

    from torchacc.checkpoint import model_state
    from torchacc.engines.sharded_model import sharded_model

    sharded = sharded_model(model)
    drawn = sharded.engine.random_state()  # which fetching moves under XLA
    found = xxhash.xxh3_64()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = optimizer.state[parameter]
            for tensor in (parameter, *(entries[key] for key in sorted(entries))):
                found.update(model_state.to_host(sharded, tensor).detach().contiguous().numpy().tobytes())
    sharded.engine.set_random_state(drawn)
    return found.hexdigest()


def consolidate(tell: Tell, *, source: str, target: str, form: str) -> None:
    """Put rank files together."""
    from torchacc.cli.main import main

    silence()
    tell("begun")
    if main(["consolidate", source, "--output", target, *(["--format", "safetensors"] if form == "hf" else [])]):
        raise SystemExit(1)
    tell("done")


def silence() -> None:
    """Print nothing: neither paths nor bars."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def convert(tell: Tell, *, source: str, target: str, form: str) -> None:
    """Write a checkpoint in another form."""
    from torchacc.cli.main import main

    silence()
    tell("begun")
    if main(["convert", source, target, "--to", form]):
        raise SystemExit(1)
    tell("done")


# Who kills


class Killer:
    """Kills attempts of one kind, and notes of each what it has left."""

    def __init__(self, kind: str, folder: Path, seed: int, log: Path | None) -> None:
        self.kind, self.folder, self.log = kind, folder, log
        self.random = random.Random(seed)
        self.kills: list[dict[str, Any]] = []

    def note(self, kill: dict[str, Any]) -> None:
        """Keep what became of a kill."""
        kill = {"kind": self.kind, **kill}
        self.kills.append(kill)
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(kill) + "\n")


class JobKiller(Killer):
    """Kills jobs that train."""

    def __init__(self, kind: str, folder: Path, seed: int, log: Path | None, number: int) -> None:
        super().__init__(kind, folder, seed, log)
        self.steps_of_a_round = min(STEPS_OF_A_ROUND, SAVES_OF_AN_ATTEMPT * number)
        self.num_processes = 1 if kind == "xla-spmd" else NUM_DEVICES
        self.run = folder / "run"
        self.acknowledged = 0
        self.newest = 0
        self.pending: list[dict[str, Any]] = []
        """The last kills, whose outcome is what the next attempt restores that comes as far as that."""
        undisturbed = self.start(folder=None, until=self.steps_of_a_round + 2 * SAVES_OF_AN_ATTEMPT)
        undisturbed.end()
        told = undisturbed.events("step")
        self.losses = {(event["rank"], event["step"]): event["loss"] for event in told}
        self.digests = {(event["rank"], event["step"]): event["digest"] for event in told}
        if set(undisturbed.codes.values()) != {0}:
            raise SystemExit(f"an undisturbed run ended with {undisturbed.codes}")
        self.start_secs = [1.0]
        self.save_secs = [0.02]

    def start(self, **options: Any) -> Attempt:
        return Attempt(train, self.num_processes, kind=self.kind, **options)

    def kill(self, number: int) -> None:
        """Kill as many attempts, and let the last one be looked at."""
        while len(self.kills) < number:
            self.attempt(kills=len(self.kills) + len(self.pending) < number)

    def attempt(self, *, kills: bool) -> None:
        """Let a job go on, which tells what became of the last kill, and kill it."""
        if self.newest >= self.steps_of_a_round and not self.pending:
            shutil.rmtree(self.run)
            self.acknowledged = self.newest = 0
        kills = kills and self.newest < self.steps_of_a_round  # else let the last kills of a round be looked at
        is_async = self.random.random() < 0.5
        until = self.newest + SAVES_OF_AN_ATTEMPT if kills else self.newest + 2
        began = time.monotonic()
        attempt = self.start(folder=str(self.run), until=until, async_save=is_async)
        kill = self.strike(attempt, began, is_async) if kills else None
        attempt.end()
        restored = attempt.events("restored")
        if len(restored) == self.num_processes or not attempt.was_killed:
            outcome = self.outcome(attempt)
            for each in self.pending:
                self.note({**each, **outcome})
            self.pending = []
        self.look_at(attempt)
        if kill is not None and attempt.was_killed:
            self.pending.append(kill)

    def strike(self, attempt: Attempt, began: float, is_async: bool) -> dict[str, Any]:
        """Kill one rank or all: while they start, or from a save on."""
        starts = self.random.random() < 0.15
        if starts:
            moment = self.random.random() * statistics.median(self.start_secs)
            time.sleep(max(0.0, began + moment - time.monotonic()))
        else:
            count = self.random.choice((1, 2, 3, 4))
            if attempt.wait_for("saving", count):
                moment = self.random.random() * 1.5 * statistics.median(self.save_secs)
                time.sleep(moment)
                self.start_secs.append(attempt.events("restored", 0)[0]["at"] - began)
            else:
                moment = 0.0
        everyone = list(range(attempt.num_processes))
        victims = self.random.choice([everyone, *([rank] for rank in everyone)])
        attempt.kill(victims)
        if victims != everyone:
            time.sleep(self.random.random() * SURVIVORS_SECS)
            attempt.kill(everyone)
        moment = round(moment, 4)
        return {"when": "start" if starts else "save", "async": is_async, "victims": victims, "secs": moment}

    def outcome(self, attempt: Attempt) -> dict[str, Any]:
        """Return what an attempt says of what it was started from."""
        restored = attempt.events("restored")
        if not restored:
            return {"outcome": "lost", "why": f"nothing was restored: {attempt.codes} {attempt.errors()}"}
        step = restored[0]["step"]
        if step < self.acknowledged or {event["step"] for event in restored} != {step}:
            return {"outcome": "lost", "why": f"restored {restored}, and {self.acknowledged} had been saved"}
        for event in restored:
            if step and event["digest"] != self.digests[event["rank"], step]:
                return {"outcome": "torn", "why": f"{event} has not the state of an undisturbed run"}
        for event in attempt.events("step"):
            if event["loss"] != self.losses[event["rank"], event["step"]]:
                return {"outcome": "torn", "why": f"{event} has not the loss of an undisturbed run"}
        return {"outcome": "resumed", "step": step, "saved": self.acknowledged}

    def look_at(self, attempt: Attempt) -> None:
        """Learn from an attempt how far the run has come, and how long a save takes."""
        for event in attempt.events("saved"):
            self.acknowledged = max(self.acknowledged, event["step"])
        for event in attempt.events("step") + attempt.events("restored"):
            self.newest = max(self.newest, event["step"])
        for event in attempt.events("saved", 0):
            self.save_secs += [event["at"] - e["at"] for e in attempt.events("saving", 0) if e["step"] == event["step"]]


class ConversionKiller(Killer):
    """Kills conversions of a small checkpoint."""

    def __init__(self, kind: str, folder: Path, seed: int, log: Path | None, number: int) -> None:
        super().__init__(kind, folder, seed, log)
        saving = Attempt(make_sources, 1, folder=str(folder))
        saving.end()
        if set(saving.codes.values()) != {0}:
            raise SystemExit(f"no checkpoint to convert: {saving.errors()}")
        rank_files, torchacc, dcp = (str(folder / name) for name in ("rank-files", "torchacc", "dcp"))
        self.tasks = {
            "consolidate": [(consolidate, rank_files, "pth"), (consolidate, rank_files, "hf")],
            "convert": [(convert, torchacc, "dcp"), (convert, dcp, "torchacc"), (convert, rank_files, "hf")],
        }[kind]
        self.secs = {form: [0.1] for _, _, form in self.tasks}
        self.sources = self.content(folder)
        self.expected: dict[tuple[str, str], dict[str, bytes]] = {}
        for number, (act, source, form) in enumerate(self.tasks):
            target = folder / f"expected-{number}"
            attempt = self.start(act, source, target, form)
            attempt.end()
            if set(attempt.codes.values()) != {0}:
                raise SystemExit(f"{act.__name__} of {source} to {form} failed: {attempt.errors()}")
            self.expected[source, form] = self.written(target)
            done, begun = attempt.events("done")[0]["at"], attempt.events("begun")[0]["at"]
            self.secs[form] = [done - begun]

    def start(self, act: Callable[..., None], source: str, target: Path, form: str) -> Attempt:
        return Attempt(act, 1, source=source, target=str(target), form=form)

    @staticmethod
    def content(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def written(self, target: Path) -> dict[str, bytes]:
        """Return what a conversion has made, but for what differs from time to time: which save it is of."""
        if target.is_file():
            return {"": target.read_bytes()}
        return {name: data for name, data in self.content(target).items() if name not in ("manifest.json", ".metadata")}

    def kill(self, number: int) -> None:
        """Kill as many conversions, and after each let one end undisturbed."""
        while len(self.kills) < number:
            act, source, form = self.random.choice(self.tasks)
            target = self.folder / "out" / "target"
            attempt = self.start(act, source, target, form)
            attempt.wait_for("begun", 1)
            moment = self.random.random() * 1.1 * statistics.median(self.secs[form])
            time.sleep(moment)
            attempt.kill([0])
            attempt.end()
            if attempt.was_killed:
                kill = {"form": form, "secs": round(moment, 4)}
                self.note({**kill, **self.outcome(act, source, target, form)})
            shutil.rmtree(self.folder / "out", ignore_errors=True)

    def outcome(self, act: Callable[..., None], source: str, target: Path, form: str) -> dict[str, Any]:
        """Return whether a kill has left nothing half written, and the next conversion ends as if undisturbed."""
        expected = self.expected[source, form]
        litter = sorted(path.name for path in target.parent.iterdir()) if target.parent.is_dir() else []
        if {name: data for name, data in self.content(self.folder).items() if name in self.sources} != self.sources:
            return {"outcome": "lost", "why": "what was read has changed"}
        if target.exists() and self.written(target).keys() == expected.keys() and self.written(target) != expected:
            return {"outcome": "torn", "why": f"{target} is not what an undisturbed conversion writes"}
        if target.exists() and act is convert:  # which writes over nothing
            whole = self.written(target) == expected
            if whole:
                return {"outcome": "resumed", "litter": litter}
            shutil.rmtree(target)
        attempt = self.start(act, source, target, form)
        attempt.end()
        if set(attempt.codes.values()) != {0}:
            return {"outcome": "lost", "why": f"the next conversion fails: {attempt.errors()}", "litter": litter}
        if self.written(target) != expected:
            return {"outcome": "torn", "why": "the next conversion writes something else", "litter": litter}
        left = sorted(path.name for path in target.parent.iterdir())
        if left != [target.name]:
            return {"outcome": "torn", "why": f"the next conversion leaves {left}", "litter": litter}
        return {"outcome": "resumed", "litter": litter}


def make_sources(tell: Tell, *, folder: str) -> None:
    """Write a small checkpoint in each form that there is a conversion from."""
    import torch
    from torch import nn

    import torchacc
    from torchacc.checkpoint.dcp import export_dcp

    torch.manual_seed(0)
    config = torchacc.Config()
    config.backend = "native"
    model = torchacc.accelerate(nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 64)), None, config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).square().mean().backward()
    optimizer.step()
    root = Path(folder)
    torchacc.checkpoint.save(root / "torchacc", model=model, optimizer=optimizer)
    rank_file = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    torchacc.save(rank_file, root / "rank-files", master_only=False)
    export_dcp(root / "torchacc", root / "dcp")


# What is found


def summary(kills: list[dict[str, Any]]) -> str:
    """Return a table of all kills, and what went wrong."""
    rows = [("what was killed", "tried", "lost", "torn", "resumed bit for bit")]
    for kind in (*JOBS, *CONVERSIONS):
        own = [kill for kill in kills if kill["kind"] == kind]
        if own:
            rows.append(_row(kind, own))
            for name, part in (("synchronous", False), ("in the background", True)):
                if kind in JOBS:
                    rows.append(_row(f"… saving {name}", [kill for kill in own if kill["async"] is part]))
    rows.append(_row("all", kills))
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    lines.insert(1, "|---|" + "---|" * (len(rows[0]) - 1))
    faults = [kill for kill in kills if kill["outcome"] in ("lost", "torn")]
    return "\n".join([*lines, *(json.dumps(fault) for fault in faults)])


def _row(name: str, kills: list[dict[str, Any]]) -> tuple[Any, ...]:
    def count(outcome: str) -> int:
        return sum(kill["outcome"] == outcome for kill in kills)

    return (name, len(kills), count("lost"), count("torn"), count("resumed"))


def main() -> int:
    """Kill what the command line says; the status is 1 where anything is lost or torn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=(*JOBS, *CONVERSIONS, "summary"))
    parser.add_argument("number", type=int, nargs="?", default=1, help="how many kills")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments and victims")
    parser.add_argument("--log", type=Path, help="where to append a line for each kill")
    args = parser.parse_args()
    if args.kind == "summary":
        kills = [json.loads(line) for line in args.log.read_text(encoding="utf-8").splitlines()]
        sys.stdout.write(summary(kills) + "\n")
        return 0
    logging.getLogger("torchacc").setLevel(logging.CRITICAL)
    import_everything("native" if args.kind in CONVERSIONS else args.kind)
    with tempfile.TemporaryDirectory(prefix="kills_") as folder:
        make = JobKiller if args.kind in JOBS else ConversionKiller
        killer = make(args.kind, Path(folder), args.seed, args.log, args.number)
        killer.kill(args.number)
    sys.stdout.write(summary(killer.kills) + "\n")
    return int(any(kill["outcome"] in ("lost", "torn") for kill in killer.kills))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
