"""Run a recipe small, natively, on what it needs: `recipes_program.py NAME`. Each says its losses."""

import json
import runpy
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import LlamaConfig, LlamaForCausalLM

import torchacc
from torchacc.cli.main import main
from torchacc.train.tokens import train_tokenizer

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
TEXTS = [f"the cat {verb} the {noun}" for verb in ("sees", "likes", "hears") for noun in ("dog", "bird", "house")] * 12


def write_model():
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=128, **shape))
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("text.txt").write_text("\n".join(TEXTS))


def write_pictures():
    random = np.random.default_rng(0)
    for name, base in (("dark", 60), ("light", 190)):
        folder = Path("pictures") / name
        folder.mkdir(parents=True)
        for index in range(8):
            noise = random.integers(0, 40, (16, 16, 3)) + base
            Image.fromarray(noise.astype(np.uint8)).save(folder / f"{index}.png")


def write_rows():
    rows = ["text,label", *(f"{text},{'animal' if 'house' not in text else 'thing'}" for text in TEXTS[:36])]
    Path("rows.csv").write_text("\n".join(rows) + "\n")
    pairs = [{"prompt": text, "chosen": " and sleeps", "rejected": " dog dog dog"} for text in TEXTS[:8]]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


ARGUMENTS = {
    "lora": "--model model --files text.txt --steps 20 --block 16 --lr 1e-2 --out out",
    "long_context": "--model model --files text.txt --steps 12 --block 16 --lr 1e-2 --out out",
    "classify": "--model model --data rows.csv --epochs 4 --length 12 --lr 5e-3 --out out",
    "vision": "--data pictures --epochs 4 --batch 8 --size 16 --patch 8 --layers 1 --width 64 --out out",
    "distill": "--teacher model --files text.txt --layers 1 --steps 20 --block 16 --out out",
    "dpo": "--model model --data pairs.jsonl --epochs 3 --length 24 --lr 1e-3 --out out",
}


def run(name):
    if name == "pretrain":
        recipe = (RECIPES / "pretrain.yaml").read_text()
        for old, new in (("MODEL", "model"), ("TEXTS", "text.txt"), ("block_size: 512", "block_size: 16")):
            assert old in recipe
            recipe = recipe.replace(old, new)
        recipe = recipe.replace("max_steps: 500", "max_steps: 30, log_every_steps: 10")
        Path("pretrain.yaml").write_text(
            recipe.replace("devices: auto", "devices: 1").replace("warmup_steps: 20", "warmup_steps: 2")
        )
        return main(["train", "--config", "pretrain.yaml"])
    sys.argv = [f"{name}.py", *ARGUMENTS[name].split()]
    runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
    return 0


if __name__ == "__main__":
    name, ready = sys.argv[1], Path("ready")
    if torchacc.dist.rank() == 0:
        write_model()
        write_rows()
        write_pictures()
        ready.touch()
    while not ready.exists():
        time.sleep(0.05)
    sys.exit(run(name))
