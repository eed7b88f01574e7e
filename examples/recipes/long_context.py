"""Train on sequences longer than a device can hold: the devices of a sample share its tokens (dist.sp).

    torchrun --standalone --nproc_per_node=4 long_context.py --model FOLDER --files 'books/*.txt' --block 32768

Any number of devices; best one that divides the attention heads. Memory: the parameters are sharded over all
devices, and each keeps the activations of its part of the tokens: with four, about what
`torchacc plan --model FOLDER --devices 4 --seq 8192 --gc --engine native` says of a quarter of them.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import torchacc
from torchacc.train.config import TextConfig
from torchacc.train.text import load_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="folder of the model, with its tokenizer")
parser.add_argument("--files", required=True, help="text to learn: a path or a glob")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--block", type=int, default=32768, help="tokens of an example")
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--out", default="long")
args = parser.parse_args()

config = torchacc.Config()
config.backend = "native"
config.dist.sp.size = torchacc.dist.world_size()  # all devices share each sample
config.memory.gc = True

model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
model.config.use_cache = False
options = TextConfig(dataset="text", files=args.files, tokenizer=args.model, block_size=args.block, packing="concat")
text = load_text(options, seed=0)
loader = DataLoader(text.train, batch_size=1, shuffle=True)

model, loader = torchacc.accelerate(model, loader, config)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

step = 0
while step < args.steps:
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss  # of all tokens, on each device
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        step += 1
        if torchacc.dist.rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")
        if step == args.steps:
            break

torchacc.checkpoint.save(args.out, model=model, tokenizer=text.tokenizer)
