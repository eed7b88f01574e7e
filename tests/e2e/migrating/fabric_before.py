"""Fine-tune a classifier with Lightning's Fabric; `fabric_after.py` is this script with torchacc."""

import json

import lightning as L
import torch
from sentences import ACCUMULATED, BATCH, EPOCHS, FOLDER, collate, make_model, training_sentences
from torch.utils.data import DataLoader


def main() -> None:
    """Train, go on from a checkpoint after each epoch, and save the model."""
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(training_sentences(), BATCH, collate_fn=collate))
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses = []
    for epoch in range(EPOCHS):
        for index, batch in enumerate(loader, start=1):
            last = index % ACCUMULATED == 0 or index == len(loader)
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(**batch).loss
                fabric.backward(loss / ACCUMULATED)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        state = {"model": model, "optimizer": optimizer}
        fabric.save(FOLDER / f"epoch-{epoch}.ckpt", state)
        fabric.barrier()
        fabric.load(FOLDER / f"epoch-{epoch}.ckpt", state)
    if fabric.is_global_zero:
        model.module.save_pretrained(FOLDER / "model")
        print(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
