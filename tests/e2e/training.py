"""What the tests of the trainer share: a small text, a training file, and processes that carry out its stages."""

import json
import random
from pathlib import Path

import yaml

from tests import forkrun

WORKER = Path(__file__).with_name("train_worker.py")
WORDS = "the quick brown fox jumps over a lazy dog while seven wise owls watch from an old oak tree"
MODEL = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 32}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def write_file(folder: Path, stages: dict, **models: dict) -> Path:
    """Write a text of documents that differ in length, and a training file with these stages; return the file."""
    draw = random.Random(0)
    lines = [
        json.dumps({"text": " ".join(draw.choices(WORDS.split(), k=draw.randint(2, 16)))}) + "\n" for _ in range(70)
    ]
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    path = folder / "config.yaml"
    content = {
        "output_dir": str(folder / "runs"),
        "training_stages": stages,
        **{f"model_config_{name}": model for name, model in models.items()},
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


def data(folder: Path) -> dict:
    """Return the section `data` of the stages: a document in each block, most of them shorter than it."""
    return {
        "dataset": "json", "files": str(folder / "text.jsonl"), "block_size": 32, "vocab_size": 300, "packing": False,
        "validation_share": 0.2, "cache_dir": str(folder / "cache"),
    }  # fmt: skip


def carry_out(path: Path, *stages: str, num_processes: int = 1, returncode: int = 0) -> dict:
    """Carry stages out in processes of their own, and return what rank 0 has found."""
    num_ranks = num_processes if num_processes > 1 else 0
    done = forkrun.run(WORKER, path, *stages, num_ranks=num_ranks, imports=["torch_xla"], timeout=400)
    assert done.returncode == returncode, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1]) if returncode == 0 else {}
