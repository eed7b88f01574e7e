"""Fine-tune a classifier with Lightning's Trainer; `lightning_after.py` is this script with torchacc."""

import json
from typing import Any

import lightning as L
from classifier import Classifier
from sentences import ACCUMULATED, BATCH, EPOCHS, FOLDER, collate, held_out_sentences, training_sentences
from torch.utils.data import DataLoader, DistributedSampler


class Losses(L.Callback):
    """Remember what the module has logged."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[float]] = {"losses": [], "val_losses": []}

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Remember a batch's loss."""
        self.numbers["losses"].append(trainer.callback_metrics["train_loss"].item())

    def on_validation_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Remember the loss over the held-out sentences."""
        self.numbers["val_losses"].append(trainer.callback_metrics["val_loss"].item())


def main() -> None:
    """Train, evaluate after each epoch, and save the model."""
    module, losses = Classifier(), Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1.0,
        callbacks=[losses],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,  # the Trainer's own shuffles a loader that does not
    )

    def loader(sentences: list[dict[str, Any]]) -> DataLoader:
        sampler = DistributedSampler(sentences, num_replicas=2, rank=trainer.global_rank, shuffle=False)
        return DataLoader(sentences, BATCH, sampler=sampler, collate_fn=collate)

    train_loader, val_loader = loader(training_sentences()), loader(held_out_sentences()[: 2 * BATCH])
    trainer.fit(module, train_loader, val_loader)
    if trainer.is_global_zero:
        module.model.save_pretrained(FOLDER / "model")
        print(json.dumps(losses.numbers))


if __name__ == "__main__":
    main()
