"""Fine-tune a causal language model from a Hugging Face folder with LoRA: the base stays frozen and sharded.

    torchrun --standalone --nproc_per_node=4 lora.py --model FOLDER --files 'texts/*.txt'

Needs peft; a device for each process. Memory: the base's shard in float32 and one unit of it, and the activations: what
`torchacc plan --model FOLDER --devices 4 --batch 4 --seq 512 --optimizer sgd --engine native` says, without its
gradients.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import torchacc
from torchacc.train.config import TextConfig
from torchacc.train.text import load_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="folder of the base, with its tokenizer")
parser.add_argument("--files", required=True, help="text to learn: a path or a glob")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--block", type=int, default=512, help="tokens of an example")
parser.add_argument("--batch", type=int, default=4, help="examples of a device")
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--out", default="adapters")
args = parser.parse_args()

config = torchacc.Config()
config.backend = "native"
config.dist.fsdp.size = torchacc.dist.world_size()

torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).train()
model.config.use_cache = False
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
options = TextConfig(dataset="text", files=args.files, tokenizer=args.model, block_size=args.block, packing="concat")
text = load_text(options, seed=0)
loader = DataLoader(text.train, batch_size=args.batch, shuffle=True)

model, loader = torchacc.accelerate(model, loader, config)
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=args.lr)

step = 0
while step < args.steps:
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        step += 1
        if torchacc.dist.rank() == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}")
        if step == args.steps:
            break

weights = torchacc.full_state_dict(model, rank0_only=True)
if torchacc.dist.rank() == 0:
    model.save_pretrained(args.out, state_dict=weights)  # the adapters alone: PeftModel.from_pretrained(base, args.out)
