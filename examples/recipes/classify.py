"""Teach a model to classify texts: a CSV file with the columns text and label.

    torchrun --standalone --nproc_per_node=2 classify.py --model FOLDER --data reviews.csv

Needs a folder with a model that transformers can classify with, and its tokenizer. Memory of a device:
`torchacc plan --model FOLDER --devices 2 --batch 16 --seq 128 --engine native`.
"""

import argparse

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import torchacc

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="folder of the model, with its tokenizer")
parser.add_argument("--data", required=True, help="CSV file with the columns text and label")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=16, help="examples of a device")
parser.add_argument("--length", type=int, default=128, help="tokens that a text is cut to")
parser.add_argument("--lr", type=float, default=5e-5)
parser.add_argument("--out", default="classifier")
args = parser.parse_args()

config = torchacc.Config()
config.backend = "native"
config.dist.fsdp.size = torchacc.dist.world_size()

torch.manual_seed(0)
rows = load_dataset("csv", data_files=args.data, split="train")
labels = sorted(set(rows["label"]))
tokenizer = AutoTokenizer.from_pretrained(args.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
names = {"id2label": dict(enumerate(map(str, labels))), "label2id": {str(label): i for i, label in enumerate(labels)}}
options = {"num_labels": len(labels), "dtype": torch.float32, **names}
model = AutoModelForSequenceClassification.from_pretrained(args.model, **options).train()
model.config.pad_token_id = tokenizer.pad_token_id


def collate(batch):
    texts = [row["text"] for row in batch]
    tokens = tokenizer(texts, truncation=True, max_length=args.length, padding="max_length", return_tensors="pt")
    return {**tokens, "labels": torch.tensor([labels.index(row["label"]) for row in batch])}


loader = DataLoader(rows, batch_size=args.batch, shuffle=True, collate_fn=collate)
model, loader = torchacc.accelerate(model, loader, config)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

for epoch in range(args.epochs):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    if torchacc.dist.rank() == 0:
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}")

torchacc.checkpoint.save(args.out, model=model, tokenizer=tokenizer)
