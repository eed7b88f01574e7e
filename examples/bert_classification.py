"""Train BERT to tell which package of the standard library some lines of code are from.

One process that drives four XLA devices:

    python examples/bert_classification.py

One process with one device, and two processes with PyTorch's own FSDP:

    python examples/bert_classification.py --engine native
    torchrun --standalone --nproc_per_node=2 examples/bert_classification.py --engine native

The model is transformers' BertForSequenceClassification from scratch, its tokenizer is trained on the text. Every
fourth file is kept for evaluation. All processes save the trained model together, as a folder that transformers opens,
and rank 0 measures its accuracy there, with transformers alone.
"""

import time
from collections import Counter
from itertools import islice
from pathlib import Path

import torch
import transformers
from common import cycle, is_master, make_config, make_parser, parse, say, write_metrics
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

import torchacc
from torchacc.train.corpus import stdlib_files
from torchacc.train.tokens import train_tokenizer

PACKAGES = ("asyncio", "ctypes", "email", "importlib", "multiprocessing", "tkinter", "unittest", "xml")
HELD_OUT_EVERY = 4  # every so many-th file of a package is kept for evaluation
VOCAB_SIZE = 2048

Example = dict[str, torch.Tensor]


def main() -> None:
    """Train, save, open the folder with transformers, measure."""
    parser = make_parser(__doc__, steps=300, batch_size=32, lr=5e-4, out="runs/bert")
    parser.add_argument("--context", type=int, default=64, help="tokens in an example")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--files", type=int, help="read at most so many files of each package")
    args = parse(parser)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)

    train_files, held_out_files = split_files(args.files)
    tokenizer = train_tokenizer([path.read_text(encoding="utf-8") for _, path in train_files], VOCAB_SIZE)
    examples = cut(train_files, tokenizer, args.context)
    held_out = cut(held_out_files, tokenizer, args.context)
    majority = Counter(int(example["labels"]) for example in held_out).most_common(1)[0][1] / len(held_out)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=args.context,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label=dict(enumerate(PACKAGES)),
        )
    )

    loader = DataLoader(examples, batch_size=args.batch_size // args.devices, shuffle=True, drop_last=True)
    model, loader = torchacc.accelerate(model, loader, make_config(args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    say(str(torchacc.describe(model)))
    say(f"{len(examples)} examples of {len(PACKAGES)} packages to learn from, {len(held_out)} to measure")

    losses, started = [], time.perf_counter()
    model.train()
    for step, batch in enumerate(islice(cycle(loader), args.steps), start=1):
        optimizer.zero_grad()
        loss = model(**batch).loss  # the mean over all devices
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 0 or step == args.steps:
            say(f"step {step:4}   loss {loss.item():.4f}   {time.perf_counter() - started:.0f} s")

    folder = args.out / "model"
    torchacc.checkpoint.save(folder, model=model, tokenizer=tokenizer)  # every process writes its part
    if is_master():
        share = accuracy(folder, held_out)
        print(f"accuracy    {share:.1%} on files never seen")
        print(f"to compare  {majority:.1%} for always naming the most frequent package")
        print(f"written     {folder}: AutoModelForSequenceClassification.from_pretrained() opens it")
        results = {"accuracy": share, "majority": majority}
        write_metrics(args.out, {"losses": [loss.item() for loss in losses], **results})


def split_files(limit: int | None) -> tuple[list[tuple[int, Path]], list[tuple[int, Path]]]:
    """Return files of all packages, each with its package's number: those to learn from, and those held out."""
    files = stdlib_files()
    train, held_out = [], []
    for label, package in enumerate(PACKAGES):
        own = [path for path in files if package in path.parts][:limit]
        held_out += [(label, path) for path in own[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]
        train += [(label, path) for index, path in enumerate(own) if (index + 1) % HELD_OUT_EVERY]
    return train, held_out


def cut(files: list[tuple[int, Path]], tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> list[Example]:
    """Cut files into examples of `length` tokens, the first of which stands for the whole, as BERT has it."""
    examples = []
    for label, path in files:
        ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"][0]
        pieces = ids[: len(ids) // (length - 1) * (length - 1)].view(-1, length - 1)
        for piece in pieces:
            first = torch.tensor([tokenizer.bos_token_id])
            examples.append({"input_ids": torch.cat([first, piece]), "labels": torch.tensor(label)})
    return examples


@torch.no_grad()
def accuracy(folder: Path, examples: list[Example]) -> float:
    """Open a model with transformers alone, and return the share of examples that it gets right."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    hits = 0
    for batch in DataLoader(examples, batch_size=64):
        hits += int((model(batch["input_ids"]).logits.argmax(dim=1) == batch["labels"]).sum())
    return hits / len(examples)


if __name__ == "__main__":
    main()
