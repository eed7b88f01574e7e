"""Train a ViT on pictures: a folder with a folder of pictures for each class.

    torchrun --standalone --nproc_per_node=2 vision.py --data pictures

Needs nothing beside pictures. Memory of a device for another size: `torchacc plan` does not plan pictures; the defaults
have 5.4 million parameters, 86 MB with gradients and AdamW's state in float32, shared by the devices.
"""

import argparse

import numpy as np
import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

import torchacc

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", required=True, help="folder of folders of pictures")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64, help="pictures of a device")
parser.add_argument("--size", type=int, default=224, help="pixels of a side; pictures are resized")
parser.add_argument("--patch", type=int, default=16)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--out", default="vit")
args = parser.parse_args()

config = torchacc.Config()
config.backend = "native"
config.dist.fsdp.size = torchacc.dist.world_size()

torch.manual_seed(0)
rows = load_dataset("imagefolder", data_dir=args.data, split="train")
names = rows.features["label"].names


def collate(batch):
    pictures = [row["image"].convert("RGB").resize((args.size, args.size)) for row in batch]
    pixels = torch.tensor(np.stack([np.asarray(picture) for picture in pictures])).permute(0, 3, 1, 2)
    return {"pixel_values": pixels / 127.5 - 1, "labels": torch.tensor([row["label"] for row in batch])}


shape = {"image_size": args.size, "patch_size": args.patch, "num_hidden_layers": args.layers}
shape |= {"hidden_size": args.width, "intermediate_size": 4 * args.width, "num_attention_heads": args.width // 64 or 1}
model = ViTForImageClassification(ViTConfig(**shape, id2label=dict(enumerate(names)), num_labels=len(names)))
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

torchacc.checkpoint.save(args.out, model=model)
