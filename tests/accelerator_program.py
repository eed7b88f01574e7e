"""Trains a small model for a few steps, and writes what can be compared: run by tests of GPUs and TPUs, and by hand.

python tests/accelerator_program.py reference 1 out.json [--model llama]
python tests/accelerator_program.py native|xla COUNT out.json [--tp 2] [--model llama] [--attention flash]
python -m torch.distributed.run --nproc_per_node=2 tests/accelerator_program.py native|xla 2 out.json

Under XLA one process drives all devices; with several processes each has one, and with `--hosts` those of its host.
Given `--reference FILE` it prints how far it is from what that run has found.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).with_name("contract")))
sys.path.insert(0, str(Path(__file__).parents[1]))
from models import make_data, make_model

import torchacc
from tests.accelerators import difference, fingerprint
from torchacc.engines import registry
from torchacc.engines.xla import runtime
from torchacc.env import installed_version

STEPS = 5
TOKENS = 128
"""Of a sample that the kernels of attention take."""


def make_llama() -> nn.Module:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TOKENS}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False)).train()


def make_tokens(count: int) -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 256, (count, TOKENS), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def configured(args: argparse.Namespace) -> torchacc.Config:
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    config = torchacc.Config(backend=args.backend)
    config.dist.tp.size, config.dist.fsdp.size = args.tp, args.count // args.tp
    config.dist.fsdp.use_spmd = args.backend == "xla" and args.count > 1 and (args.hosts or not is_launched)
    config.compute.attention = args.attention
    config.memory.gpu_fraction = 0.3
    config.memory.gpu_preallocate = False
    return config


def about_devices() -> dict[str, Any]:
    """Return what an issue about this run should say of its devices."""
    engine = registry.active_engine()
    found = {"device": str(engine.device), "engine": engine.name, "kind": engine.device_name()}
    if engine.name.startswith("xla"):
        found |= {"platform": runtime.platform(), "places": runtime.device_places()}
        found["versions"] = {name: installed_version(name) for name in ("torch", "torch_xla", "libtpu", "jax")}
        found |= {name: getattr(engine, name) for name in ("device_order", "ordinals") if hasattr(engine, name)}
    return found


def train(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    is_llama = args.model == "llama"
    model = make_llama() if is_llama else make_model("gpt2", chooses_experts=args.backend != "xla")
    data = make_tokens(STEPS * args.rows) if is_llama else make_data("gpt2")
    loader = DataLoader(data, args.rows // (args.count // args.tp))
    found: dict[str, Any] = {"device": "cpu", "platform": None}
    if args.backend != "reference":
        model, loader = torchacc.accelerate(model, loader, configured(args))
        found |= about_devices()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    losses, norms, seconds = [], [], []
    for _, batch in zip(range(STEPS), loader, strict=False):
        began = time.monotonic()
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        losses.append(loss.item())
        norms.append(norm.item())
        seconds.append(time.monotonic() - began)
    weights = model.state_dict() if args.backend == "reference" else torchacc.full_state_dict(model)
    found["weights"] = {name: fingerprint(value) for name, value in weights.items()}
    if args.save:
        torchacc.checkpoint.save(args.save, model=model, optimizer=optimizer)
    return found | {"losses": losses, "norms": norms, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["reference", "native", "xla"])
    parser.add_argument("count", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--rows", type=int, default=8, help="of all devices in a step; of a Llama also others than 8")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--save")
    parser.add_argument("--reference", type=Path)
    args = parser.parse_args()
    found = train(args)
    if int(os.environ.get("RANK", "0")) == 0:
        args.out.write_text(json.dumps(found))
        if args.reference is not None:
            far = difference(found, json.loads(args.reference.read_text()))
            about = {name: found[name] for name in found if name not in ("losses", "norms", "weights")}
            print(f"\nTo report: largest relative difference from the CPU {far:.1e}; {json.dumps(about)}")


if __name__ == "__main__":
    main()
