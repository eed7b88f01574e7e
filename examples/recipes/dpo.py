"""Tune a language model on preferences by DPO (Rafailov et al., 2023): a JSON-lines file of prompt, chosen, rejected.

    torchrun --standalone --nproc_per_node=4 dpo.py --model FOLDER --data pairs.jsonl

Needs a folder with the model and its tokenizer. The reference's log-probabilities are computed first, by the sharded
model, so that there is one. Memory of a device, for two pairs:
`torchacc plan --model FOLDER --devices 4 --batch 4 --seq 512 --engine native`.
"""

import argparse

import torch
from datasets import load_dataset
from torch.nn.functional import log_softmax, logsigmoid
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchacc

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="folder of the model, with its tokenizer")
parser.add_argument("--data", required=True, help="JSON lines with prompt, chosen and rejected")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch", type=int, default=2, help="pairs of a device")
parser.add_argument("--length", type=int, default=512, help="tokens that prompt and answer are cut to")
parser.add_argument("--beta", type=float, default=0.1)
parser.add_argument("--lr", type=float, default=1e-6)
parser.add_argument("--out", default="preferred")
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_cache=False)


def encode(prompt, answer):
    start, ids = len(tokenizer(prompt)["input_ids"]), tokenizer(prompt + answer)["input_ids"]
    cut = max(0, len(ids) - args.length)  # a prompt that is too long loses its beginning
    ids, start = ids[cut:], max(0, start - cut)
    missing = args.length - len(ids)
    return ids + [tokenizer.eos_token_id] * missing, [0] * start + [1] * (len(ids) - start) + [0] * missing


def logps(batch):
    """Return the log-probabilities of each pair's answers: (pairs, 2)."""
    ids, counts = batch["ids"].flatten(0, 1), batch["counts"].flatten(0, 1)
    found = log_softmax(model(ids[:, :-1]).logits.float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (found * counts[:, 1:]).sum(-1).view(-1, 2)


rows = []
for index, row in enumerate(load_dataset("json", data_files=args.data, split="train")):
    pair = [encode(row["prompt"], row[name]) for name in ("chosen", "rejected")]
    ids, counts = (torch.tensor(parts) for parts in zip(*pair, strict=True))
    rows.append({"index": index, "ids": ids, "counts": counts})

config = torchacc.Config()
config.backend = "native"
config.dist.fsdp.size = torchacc.dist.world_size()
model = torchacc.accelerate(model, config=config)
with torch.no_grad():  # each device its own pairs, in as many forwards as the others, and all get all results
    for batch in torchacc.shard_loader(DataLoader(rows, batch_size=args.batch), model):
        places, found = torchacc.dist.all_gather(batch["index"]), torchacc.dist.all_gather(logps(batch)).cpu()
        for index, pair in zip(places.tolist(), found, strict=True):
            rows[index]["reference"] = pair
loader = torchacc.shard_loader(DataLoader(rows, batch_size=args.batch, shuffle=True), model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for epoch in range(args.epochs):
    for batch in loader:
        optimizer.zero_grad()
        ratios = logps(batch) - batch["reference"]
        loss = -logsigmoid(args.beta * (ratios[:, 0] - ratios[:, 1])).mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    if torchacc.dist.rank() == 0:
        print(f"epoch {epoch + 1}  loss {loss.item():.4f}  margin {(ratios[:, 0] - ratios[:, 1]).mean().item():.3f}")
torchacc.checkpoint.save(args.out, model=model, tokenizer=tokenizer)
