"""Checkpoints of jobs that are killed, of runs that are asked to end, and checkpoints whose bytes are altered.

Twenty kills; `python tests/e2e/kills.py` makes as many as one wants, and docs/checkpoints.md has a table.
"""

import json
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch

import torchacc
from tests import forkrun
from torchacc.checkpoint import loader, saver
from torchacc.errors import CheckpointError

WORKER = Path(__file__).with_name("fault_worker.py")
PROGRAM = Path(__file__).with_name("kills.py")
KILLS = {"native": 8, "xla-spmd": 4, "xla-multiprocess": 2, "consolidate": 3, "convert": 3}
SECONDS_TO_RUN = 600
NUM_FLIPS = 200

each_engine = pytest.mark.parametrize(
    "kind",
    [
        "native",
        pytest.param("xla-multiprocess", marks=pytest.mark.xla),
        pytest.param("xla-spmd", marks=pytest.mark.xla),
    ],
)


def run(program: Path, *arguments: object, kind: str) -> "subprocess.CompletedProcess[str]":
    imports = ["torch_xla"] if kind.startswith("xla") else []
    return forkrun.run(program, *arguments, imports=imports, timeout=SECONDS_TO_RUN)


def supervise(mode: str, kind: str, folder: Path, *arguments: object) -> dict:
    done = run(WORKER, mode, kind, 2, folder, *arguments, kind=kind)
    reports = [line.removeprefix("REPORT ") for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert reports, done.stderr[-6000:]
    return json.loads(reports[0])


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_TO_RUN + 60)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.xla) if kind.startswith("xla") else kind for kind in KILLS]
)
def test_what_is_killed_goes_on_bit_for_bit(kind, tmp_path):
    done = run(PROGRAM, kind, KILLS[kind], "--seed", 4, "--log", tmp_path / "log", kind=kind)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    kills = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    assert [kill["outcome"] for kill in kills] == ["resumed"] * KILLS[kind]


@pytest.mark.slow
@each_engine
def test_sigterm_to_one_process_saves_all_at_one_step(kind, tmp_path):
    assert supervise("sigterm", kind, tmp_path)["faults"] == []


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.Popen(
        [forkrun.python(), *launcher, str(WORKER), "train", "native", "2", str(tmp_path / "run")],
        env=forkrun.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        lines = []
        for line in process.stdout:  # not communicate(), which would drop what this has read ahead
            lines.append(line)
            if len(lines) == 21:
                process.send_signal(signal.SIGTERM)
        process.wait(timeout=100)
        printed = "".join(lines)
    finally:
        process.kill()
    assert process.returncode != 0
    last = [max(map(int, re.findall(rf"^{rank} step .*'step': (\d+)", printed, re.MULTILINE))) for rank in (0, 1)]
    assert last[0] == last[1], printed[-3000:]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"step-{last[0]:08d}"], printed[-3000:]
    loader.verify(tmp_path / "run" / f"step-{last[0]:08d}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a small model with its optimizer, and what to load it with."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = torchacc.Config()
    config.backend = "native"
    model = torchacc.accelerate(
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)), None, config
    )
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.arange(8)[None]
    model(inputs, labels=inputs).loss.backward()
    optimizer.step()
    folder = tmp_path_factory.mktemp("flips") / "step-00000001"
    parts = {"model": model, "optimizer": optimizer}
    saver.save(folder, extra={"tensor": torch.arange(5.0)}, max_shard_size=100_000, **parts)
    return folder, parts


def test_every_flipped_bit_is_caught(saved):
    """By verifying, and by loading: everywhere in every file, the manifest included."""
    folder, parts = saved
    files = sorted(folder.iterdir())
    assert {"manifest.json", "config.json", "optimizer.json", "state.json"} < {path.name for path in files}
    chance = random.Random(5)
    for number in range(NUM_FLIPS):
        # Half of them in any file, so that small ones and headers have their share; half over all bytes.
        sizes = [path.stat().st_size for path in files]
        path = chance.choice(files) if number % 2 else chance.choices(files, weights=sizes)[0]
        original = path.read_bytes()
        position, bit = chance.randrange(len(original)), chance.randrange(8)
        altered = bytearray(original)
        altered[position] ^= 1 << bit
        path.write_bytes(altered)
        for act in (lambda: loader.verify(folder), lambda: loader.load(folder, **parts)):
            with pytest.raises(CheckpointError) as caught:
                act()
            assert path.name in str(caught.value), (position, bit)
        path.write_bytes(original)
    loader.verify(folder)
    assert loader.load(folder, **parts)["tensor"].tolist() == [0, 1, 2, 3, 4]
