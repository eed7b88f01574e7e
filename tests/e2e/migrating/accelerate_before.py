"""Fine-tune a classifier with Accelerate as its examples do; `accelerate_after.py` is this script with torchacc."""

import json

import torch
from accelerate import Accelerator
from sentences import ACCUMULATED, BATCH, EPOCHS, FOLDER, collate, held_out_sentences, make_model, training_sentences
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


def main() -> None:
    """Train, evaluate after each epoch, and save the model."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    train_loader = DataLoader(training_sentences(), BATCH, collate_fn=collate)
    eval_loader = DataLoader(held_out_sentences(), BATCH, collate_fn=collate)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, len(train_loader) * EPOCHS // ACCUMULATED)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    losses, accuracies = [], []
    for _ in range(EPOCHS):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        model.eval()
        correct = 0
        for batch in eval_loader:
            with torch.no_grad():
                predicted = model(**batch).logits.argmax(-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, batch["labels"]))
            correct += (predicted == labels).sum().item()
        accuracies.append(correct / len(held_out_sentences()))
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        FOLDER / "model", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.print(json.dumps({"losses": losses, "accuracies": accuracies}))


if __name__ == "__main__":
    main()
