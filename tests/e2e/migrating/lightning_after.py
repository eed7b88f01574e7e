"""`lightning_before.py` with torchacc, by docs/migrating/lightning.md."""

import contextlib
import json
import sys

import torch
from classifier import Classifier
from sentences import ACCUMULATED, BATCH, EPOCHS, FOLDER, collate, held_out_sentences, training_sentences
from torch.utils.data import DataLoader

import torchacc


def main() -> None:
    """Train, evaluate after each epoch, and save the model."""
    config = torchacc.Config()
    config.backend = sys.argv[2]
    config.dist.fsdp.size = torchacc.dist.world_size()
    train_loader = DataLoader(training_sentences(), BATCH, collate_fn=collate)
    val_loader = DataLoader(held_out_sentences()[: 2 * BATCH], BATCH, collate_fn=collate)
    module = Classifier()
    module.model, train_loader = torchacc.accelerate(module.model, train_loader, config)
    val_loader = torchacc.shard_loader(val_loader, module.model)
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    losses, val_losses = [], []
    for _ in range(EPOCHS):
        module.train()
        for index, batch in enumerate(train_loader):
            last = (index + 1) % ACCUMULATED == 0 or index + 1 == len(train_loader)
            with contextlib.nullcontext() if last else torchacc.accumulate(module.model):
                loss = module.training_step(batch, index)
                (loss / ACCUMULATED).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        module.eval()
        with torch.no_grad():
            val_losses += [module.validation_step(batch, index).item() for index, batch in enumerate(val_loader)]
    torchacc.checkpoint.save(FOLDER / "model", model=module.model)
    if torchacc.dist.is_master_ordinal(local=False):
        print(json.dumps({"losses": losses, "val_losses": val_losses}))


if __name__ == "__main__":
    main()
