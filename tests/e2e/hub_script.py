"""An ordinary Hugging Face script with the lines of torchacc added; test_hub_script.py runs it beside local folders."""

import json
import sys

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import torchacc

options = json.loads(sys.argv[1])
torch.manual_seed(0)

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
tokenizer = AutoTokenizer.from_pretrained("gpt2", use_fast=False)
tokenizer.pad_token = tokenizer.eos_token


def encode(examples):
    texts = [text for text in examples["text"] if text]
    encoded = tokenizer(texts, truncation=True, padding="max_length", max_length=32)
    return {**encoded, "labels": encoded["input_ids"]}


dataset = load_dataset("wikitext", "wikitext-2-raw-v1", split="train")
dataset = dataset.map(encode, batched=True, remove_columns=["text"])
dataset.set_format(type="torch", columns=["input_ids", "attention_mask", "labels"])
loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)

config = torchacc.Config()
config.backend = options["backend"]
config.compute.bf16 = options["bf16"]
config.dist.fsdp.size = 4
config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}
config.dist.fsdp.use_spmd = options["use_spmd"]
model, loader = torchacc.accelerate(model, loader, config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

model.train()
losses, rows = [], 0
for batch in loader:
    optimizer.zero_grad()
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):  # as scripts for a GPU have it: without CUDA it does nothing
        loss = model(**batch)["loss"]
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    rows += len(batch["input_ids"])

facts = {
    "rank": torchacc.dist.rank(),
    "losses": losses,
    "rows": rows,
    "held": sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters()),
    "parameters": torchacc.describe(model).num_parameters,
    "dataset": len(dataset),
}
sys.stdout.write(f"FACTS {json.dumps(facts)}\n")
