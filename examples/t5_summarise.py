"""Train T5 to sum up a piece of code in a word: the module of the standard library that it is from.

One process that drives four XLA devices:

    python examples/t5_summarise.py

One process with one device, and two processes with PyTorch's own FSDP:

    python examples/t5_summarise.py --engine native
    torchrun --standalone --nproc_per_node=2 examples/t5_summarise.py --engine native

The model is a small T5 from scratch: its encoder reads code, its decoder writes the name, token by token. Every eighth
piece of a module is held out. At the end rank 0 gets the whole weights, and a plain copy of the model names the modules
of held-out pieces with generate().
"""

import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import torch
import transformers
from common import cycle, is_master, make_config, make_parser, parse, say, write_metrics
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, T5Config, T5ForConditionalGeneration

import torchacc
from torchacc.train.corpus import stdlib_files
from torchacc.train.tokens import train_tokenizer

VOCAB_SIZE = 1024
HELD_OUT_EVERY = 8  # every so many-th piece of a module is kept for evaluation
HELD_OUT_PIECES = 512
NUM_SHOWN = 3  # pieces that are printed at the end

Example = dict[str, torch.Tensor]


def main() -> None:
    """Train, evaluate, write names."""
    parser = make_parser(__doc__, steps=300, batch_size=32, lr=2e-3, out="runs/t5")
    parser.add_argument("--context", type=int, default=64, help="tokens of code in an example")
    parser.add_argument("--layers", type=int, default=2, help="of the encoder, and of the decoder")
    parser.add_argument("--modules", type=int, default=20, help="the largest so many of the standard library")
    args = parse(parser)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)

    modules = read_modules(args.modules)
    tokenizer = train_tokenizer(modules.values(), VOCAB_SIZE)
    examples, held_out = cut(modules, tokenizer, args.context)
    model_config = T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_heads=4,
        num_layers=args.layers,
        dropout_rate=0.0,
        pad_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
    )

    per_device = args.batch_size // args.devices
    loader = DataLoader(examples, batch_size=per_device, shuffle=True, drop_last=True)
    model, loader = torchacc.accelerate(T5ForConditionalGeneration(model_config), loader, make_config(args))
    held_out_loader = torchacc.shard_loader(DataLoader(held_out, batch_size=per_device), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    say(str(torchacc.describe(model)))
    before = evaluate(model, held_out_loader)

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
    after = evaluate(model, held_out_loader)
    say(f"held out    loss {before:.4f} untrained, {after:.4f} trained")

    weights = torchacc.full_state_dict(model, rank0_only=True)  # every process takes part
    if is_master():
        plain = T5ForConditionalGeneration(model_config)
        plain.load_state_dict(weights)
        results = {"untrained": before, "trained": after, **write_names(plain.eval(), held_out, tokenizer)}
        write_metrics(args.out, {"losses": [loss.item() for loss in losses], **results})


def read_modules(count: int) -> dict[str, str]:
    """Return the text of the largest modules by name."""
    largest = sorted(stdlib_files(), key=lambda path: path.stat().st_size)[-count:]
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(largest)}


def cut(
    modules: dict[str, str], tokenizer: PreTrainedTokenizerBase, length: int
) -> tuple[list[Example], list[Example]]:
    """Cut modules into pieces of `length` tokens: those to learn from, and those held out.

    Names are completed to one length with the end-of-text token, which is learnt: all devices have as many labels.
    """
    names = {name: [*tokenizer(name)["input_ids"], tokenizer.eos_token_id] for name in modules}
    longest = max(map(len, names.values()))
    train, held_out = [], []
    for name, text in modules.items():
        tokens = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        label = torch.tensor(names[name] + (longest - len(names[name])) * [tokenizer.eos_token_id])
        pieces = tokens[: len(tokens) // length * length].view(-1, length)
        for index, piece in enumerate(pieces, start=1):
            (train if index % HELD_OUT_EVERY else held_out).append({"input_ids": piece, "labels": label})
    return train, held_out[:: -(-len(held_out) // HELD_OUT_PIECES)]


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[Example]) -> float:
    """Return the mean loss over a loader."""
    was_training = model.training
    model.eval()
    losses = torch.stack([model(**batch).loss for batch in loader])
    model.train(was_training)
    return losses.mean().item()


@torch.no_grad()
def write_names(
    model: T5ForConditionalGeneration, examples: list[Example], tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Let a plain model write names, print some, and return the share that is right, and what to compare it with."""
    pieces = torch.stack([example["input_ids"] for example in examples])
    labels = torch.stack([example["labels"] for example in examples])
    written = model.generate(pieces, max_new_tokens=labels.shape[1], do_sample=False)[:, 1:]  # behind the start
    asked, got = (tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in (labels, written))
    for index in range(0, len(examples), len(examples) // NUM_SHOWN + 1):
        print(f"{tokenizer.decode(pieces[index])!r}\n    wrote {got[index]}; it is {asked[index]}")
    accuracy = sum(a == b for a, b in zip(asked, got, strict=True)) / len(examples)
    majority = Counter(asked).most_common(1)[0][1] / len(examples)
    print(f"accuracy    {accuracy:.1%} of the names are right, letter by letter, on pieces never seen")
    print(f"to compare  {majority:.1%} for always writing the most frequent one")
    return {"accuracy": accuracy, "majority": majority}


if __name__ == "__main__":
    main()
