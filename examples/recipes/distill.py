"""Distil a language model: a student with fewer layers learns its teacher's distribution of each next token.

    torchrun --standalone --nproc_per_node=4 distill.py --teacher FOLDER --files 'texts/*.txt' --layers 6

Needs a folder with the teacher and its tokenizer. Memory of a device: the whole teacher, which is not sharded, in
bfloat16 on a GPU, and its logits; and the student, at most what
`torchacc plan --model FOLDER --devices 4 --batch 4 --seq 512 --engine native` says of the teacher.
"""

import argparse

import torch
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import torchacc
from torchacc.train.config import TextConfig
from torchacc.train.text import load_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--teacher", required=True, help="folder of the teacher, with its tokenizer")
parser.add_argument("--files", required=True, help="text to learn: a path or a glob")
parser.add_argument("--layers", type=int, default=6, help="of the student")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--block", type=int, default=512, help="tokens of an example")
parser.add_argument("--batch", type=int, default=4, help="examples of a device")
parser.add_argument("--temperature", type=float, default=2.0)
parser.add_argument("--lr", type=float, default=3e-4)
parser.add_argument("--out", default="student")
args = parser.parse_args()

config = torchacc.Config()
config.backend = "native"
config.dist.fsdp.size = torchacc.dist.world_size()

torch.manual_seed(0)
teacher = AutoModelForCausalLM.from_pretrained(args.teacher).eval().requires_grad_(False)
shape = AutoConfig.from_pretrained(args.teacher, use_cache=False, num_hidden_layers=args.layers)
student = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
options = TextConfig(dataset="text", files=args.files, tokenizer=args.teacher, block_size=args.block, packing="concat")
text = load_text(options, seed=0)
loader = DataLoader(text.train, batch_size=args.batch, shuffle=True)

student, loader = torchacc.accelerate(student, loader, config)
device = next(student.parameters()).device
teacher.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr)

step = 0
while step < args.steps:
    for batch in loader:
        optimizer.zero_grad()
        with torch.no_grad():
            target = log_softmax(teacher(batch["input_ids"].to(device)).logits.float() / args.temperature, dim=-1)
        said = log_softmax(student(batch["input_ids"]).logits.float() / args.temperature, dim=-1)
        loss = kl_div(said.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean")
        loss.backward()
        student.clip_grad_norm_(1.0)
        optimizer.step()
        step += 1
        if torchacc.dist.rank() == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}")
        if step == args.steps:
            break

torchacc.checkpoint.save(args.out, model=student, tokenizer=text.tokenizer)
