"""Train a tiny GPT-2 with a RunLog: `run_log_worker.py engine folder`; rank 0 prints what it measured itself."""

import json
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

import torchacc
from torchacc.env import read_job
from torchacc.train.config import LoggingConfig, WandbConfig
from torchacc.train.flops import flops_per_token
from torchacc.train.log_files import log_files
from torchacc.train.metrics import RunLog

STEPS, LENGTH = 12, 16


def transfers(engine):
    """Return how often something was fetched from the devices; between processes gradients are, too."""
    if engine != "xla-spmd":
        return 0
    import torch_xla.debug.metrics as metrics

    return (metrics.metric_data("TransferFromDeviceTime") or [0])[0]


def main(engine, folder, logging):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = AutoModelForCausalLM.from_config(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    texts = torch.randint(0, 64, (4 * STEPS, LENGTH))
    loader = DataLoader([{"input_ids": text, "labels": text} for text in texts], batch_size=2)
    config = torchacc.Config(backend="native" if engine == "native" else "xla")
    config.dist.fsdp.size = 2
    config.dist.fsdp.use_spmd = engine == "xla-spmd"
    model, loader = torchacc.accelerate(model, loader, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    log = RunLog(
        folder,
        {"model": asdict(torchacc.describe(model)), "config": config.to_dict()},
        total_steps=STEPS,
        tokens_per_step=4 * LENGTH,
        log_every_steps=5,
        flops_per_token=flops_per_token(model, LENGTH),
        logging=logging,
        wandb=WandbConfig(use_wandb=engine == "native", project="demo"),
        is_master=torchacc.dist.is_master_ordinal(local=False),
    )
    losses, fetches = [], []
    for step, batch in enumerate(islice(loader, STEPS), start=1):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.detach())
        before = transfers(engine)
        log.step(step, loss=loss, grad_norm=norm, lr=1e-3)
        fetches.append(transfers(engine) - before)
    log.close("finished")
    num_compiles = torchacc.compile_report().graphs
    return {"losses": [loss.item() for loss in losses], "fetches": fetches, "num_compiles": num_compiles}


if __name__ == "__main__":
    engine, folder = sys.argv[1], Path(sys.argv[2])
    logging = LoggingConfig(debug=True, log_file="training.log", tensorboard=engine == "native")
    rank = read_job().rank
    with log_files(folder, logging, rank=rank):
        found = main(engine, folder, logging)
    if rank == 0:
        print(json.dumps(found))
