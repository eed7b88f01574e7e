"""`accelerate_before.py` with torchacc, by docs/migrating/accelerate.md."""

import contextlib
import json
import sys

import torch
from sentences import ACCUMULATED, BATCH, EPOCHS, FOLDER, collate, held_out_sentences, make_model, training_sentences
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import torchacc


def main() -> None:
    """Train, evaluate after each epoch, and save the model."""
    config = torchacc.Config()
    config.backend = sys.argv[2]
    config.dist.fsdp.size = torchacc.dist.world_size()
    train_loader = DataLoader(training_sentences(), BATCH, collate_fn=collate)
    eval_loader = DataLoader(held_out_sentences(), BATCH, collate_fn=collate)
    model, train_loader = torchacc.accelerate(make_model(), train_loader, config)
    eval_loader = torchacc.shard_loader(eval_loader, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Accelerate steps a schedule once for each process.
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, len(train_loader) * EPOCHS // ACCUMULATED)
    losses, accuracies = [], []
    for _ in range(EPOCHS):
        model.train()
        for index, batch in enumerate(train_loader, start=1):
            last = index % ACCUMULATED == 0 or index == len(train_loader)
            with contextlib.nullcontext() if last else torchacc.accumulate(model):
                loss = model(**batch).loss
                (loss / ACCUMULATED).backward()
            if last:
                model.clip_grad_norm_(1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        correct = seen = 0
        for batch in eval_loader:
            with torch.no_grad():
                predicted = model(**batch).logits.argmax(-1)
            rows = slice(len(held_out_sentences()) - seen)
            predicted, labels = (torchacc.dist.all_gather(each)[rows] for each in (predicted, batch["labels"]))
            correct += (predicted == labels).sum().item()
            seen += len(labels)
        accuracies.append(correct / len(held_out_sentences()))
    torchacc.checkpoint.save(FOLDER / "model", model=model)
    if torchacc.dist.is_master_ordinal(local=False):
        print(json.dumps({"losses": losses, "accuracies": accuracies}))


if __name__ == "__main__":
    main()
