"""Train GPT-2 fully sharded, on an ordinary machine, with nothing to download.

One process that drives four XLA devices:

    python examples/gpt2_fsdp.py

Four processes with one XLA device each:

    torchrun --standalone --nproc_per_node=4 examples/gpt2_fsdp.py --engine xla

Four processes with PyTorch's own FSDP, on GPUs where there are any:

    torchrun --standalone --nproc_per_node=4 examples/gpt2_fsdp.py --engine native

The model is a small GPT-2 and the text is Python's standard library; on two cores it takes a few minutes.
GPT-2 itself on WikiText-2, from the hub or from folders of those names in the working directory:

    python examples/gpt2_fsdp.py --model gpt2 --dataset wikitext --bf16

Needs `pip install transformers tqdm matplotlib`, and `datasets` for WikiText-2. Writes loss.png, sample.txt and
metrics.json under --out.
"""

import argparse
import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from common import add_device_options, choose_devices, cycle, is_master, make_config
from corpus import Corpus, blocks_of, load_corpus
from loss_plot import plot_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

import torchacc

FETCH_EVERY = 10  # steps between two looks at the loss: each look waits for the devices
HELD_OUT_BLOCKS = 256
PROMPTS = {"stdlib": "def", "wikitext": "The"}


def main() -> None:
    """Train, evaluate, and write down what happened."""
    args = parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(args.seed)

    corpus = load_corpus(args.dataset, args.model, args.files)
    model_config = make_model_config(args, corpus)
    model = AutoModelForCausalLM.from_config(model_config)
    loader = DataLoader(blocks_of(corpus.train, args.context), batch_size=args.batch_size, shuffle=True, drop_last=True)
    held_out_blocks = blocks_of(corpus.held_out, args.context, limit=HELD_OUT_BLOCKS)
    held_out_loader = DataLoader(held_out_blocks, batch_size=args.batch_size)

    config = make_config(args)
    config.compute.bf16 = args.bf16
    config.dist.fsdp.wrap_layer_cls = {"GPT2Block"}
    model, loader = torchacc.accelerate(model, loader, config)
    held_out_loader = torchacc.shard_loader(held_out_loader, model)

    losses, train_secs = train(model, loader, args)
    held_out_loss = evaluate(model, held_out_loader)
    sharding = torchacc.describe(model)
    weights = torchacc.full_state_dict(model)  # every process takes part, so it stands outside of the `if`

    if is_master():
        metrics = asdict(sharding) | {
            "num_compiles": torchacc.compile_report().graphs,
            "train_secs": train_secs,
            "tokens_per_sec": args.steps * tokens_per_step(args) / train_secs,
            "unigram_entropy": corpus.unigram_entropy,
            "held_out_loss": held_out_loss,
            "losses": losses,
        }
        print(sharding)
        print(torchacc.compile_report())
        report(metrics, sample(model_config, weights, corpus, args), args.out)


def parse_args() -> argparse.Namespace:
    """Read the command line; refuse a number of devices that this launch cannot give."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_device_options(parser)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; the weights stay in float32")
    parser.add_argument("--model", default="small", help='"small", or the name of a GPT-2 on the hub')
    parser.add_argument("--dataset", choices=["stdlib", "wikitext"], default="stdlib")
    parser.add_argument("--files", type=int, help="of the standard library, to read at most (default: all)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per device and step")
    parser.add_argument("--context", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/gpt2"))
    args = parser.parse_args()

    choose_devices(parser, args)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: it starts at 1")
    return args


def make_model_config(args: argparse.Namespace, corpus: Corpus) -> transformers.PretrainedConfig:
    """Return the configuration of the model that --model names."""
    if args.model != "small":
        return AutoConfig.from_pretrained(args.model)
    end = corpus.tokenizer.eos_token_id
    shape = {"vocab_size": len(corpus.tokenizer), "n_positions": args.context, "n_embd": 256, "n_layer": 4, "n_head": 4}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(**shape, **no_dropout, bos_token_id=end, eos_token_id=end)


def train(
    model: torch.nn.Module, loader: Iterable[dict[str, torch.Tensor]], args: argparse.Namespace
) -> tuple[list[float], float]:
    """Take --steps optimizer steps.

    Returns:
        The loss of each step's batch before the step, and the seconds that all of them took.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, args.steps))
    losses: list[float] = []
    pending: list[torch.Tensor] = []
    model.train()
    started = last_look = time.perf_counter()
    with tqdm(total=args.steps, unit="step", disable=not is_master()) as bar:
        for step, batch in enumerate(islice(cycle(loader), args.steps), start=1):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            pending.append(loss.detach())
            if step % FETCH_EVERY == 0 or step in (1, args.steps):
                losses += [value.item() for value in pending]
                now = time.perf_counter()
                tokens_per_sec = len(pending) * tokens_per_step(args) / (now - last_look)
                bar.set_postfix_str(f"loss {losses[-1]:.3f}, {tokens_per_sec:,.0f} tokens/s")
                bar.update(len(pending))
                pending, last_look = [], now
    return losses, time.perf_counter() - started


def lr_factor(step: int, steps: int) -> float:
    """Warm up over the first twentieth of the steps, then follow a cosine down to a tenth."""
    warmup = (step + 1) / max(1, steps // 20)
    return min(warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def evaluate(model: torch.nn.Module, loader: Iterable[dict[str, torch.Tensor]]) -> float:
    """Return the mean loss over a loader."""
    model.eval()
    losses = [model(**batch).loss.item() for batch in loader]
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(
    model_config: transformers.PretrainedConfig,
    weights: dict[str, torch.Tensor],
    corpus: Corpus,
    args: argparse.Namespace,
) -> str:
    """Let a plain copy of the model on the CPU continue a prompt."""
    model = AutoModelForCausalLM.from_config(model_config)
    model.load_state_dict(weights)
    model.eval()
    torch.manual_seed(args.seed)
    prompt = corpus.tokenizer(PROMPTS[args.dataset], return_tensors="pt")
    new_tokens = args.context - prompt["input_ids"].shape[1]
    tokens = model.generate(**prompt, max_new_tokens=new_tokens, do_sample=True, temperature=0.8, pad_token_id=0)
    return corpus.tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n"


def report(metrics: dict[str, Any], text: str, out: Path) -> None:
    """Write the files of the run, and print how it went."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (out / "sample.txt").write_text(text, encoding="utf-8")
    plot_loss(metrics, out / "loss.png")
    losses, secs, held_out = metrics["losses"], metrics["train_secs"], metrics["held_out_loss"]
    print(f"training    {len(losses)} steps in {secs:.0f} s, {metrics['tokens_per_sec']:,.0f} tokens/s")
    print(f"loss        {losses[0]:.3f} at first, {losses[-1]:.3f} at last, {held_out:.3f} on held-out text")
    print(f"to compare  {metrics['unigram_entropy']:.3f} for knowing how often each token occurs and nothing else")
    print(f"written     loss.png, sample.txt, metrics.json in {out}")


def tokens_per_step(args: argparse.Namespace) -> int:
    """Return the tokens in a batch of all devices."""
    return args.devices * args.batch_size * args.context


if __name__ == "__main__":
    main()
