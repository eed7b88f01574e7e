"""`fabric_before.py` with torchacc, by docs/migrating/lightning.md."""

import contextlib
import json
import sys

import torch
from sentences import ACCUMULATED, BATCH, EPOCHS, FOLDER, collate, make_model, training_sentences
from torch.utils.data import DataLoader

import torchacc


def main() -> None:
    """Train, go on from a checkpoint after each epoch, and save the model."""
    config = torchacc.Config()
    config.backend = sys.argv[2]
    config.dist.fsdp.size = torchacc.dist.world_size()
    loader = DataLoader(training_sentences(), BATCH, collate_fn=collate)
    model, loader = torchacc.accelerate(make_model(), loader, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for epoch in range(EPOCHS):
        for index, batch in enumerate(loader, start=1):
            last = index % ACCUMULATED == 0 or index == len(loader)
            with contextlib.nullcontext() if last else torchacc.accumulate(model):
                loss = model(**batch).loss
                (loss / ACCUMULATED).backward()
            if last:
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        torchacc.checkpoint.save(FOLDER / f"epoch-{epoch}", model=model, optimizer=optimizer)
        torchacc.checkpoint.load(FOLDER / f"epoch-{epoch}", model=model, optimizer=optimizer)
    torchacc.checkpoint.save(FOLDER / "model", model=model)
    if torchacc.dist.is_master_ordinal(local=False):
        print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
