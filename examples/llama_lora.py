"""Teach a Llama that has learnt Python's code to read Python's manual, with LoRA: the base stays as it is.

One process that drives four XLA devices:

    python examples/llama_lora.py

One process with one device, and two processes with PyTorch's own FSDP:

    python examples/llama_lora.py --engine native
    torchrun --standalone --nproc_per_node=2 examples/llama_lora.py --engine native

First a small Llama is trained on the standard library and saved as a folder, which --base NAME replaces by a model of
yours, from a folder or the hub. Then peft puts adapters into it, and these alone get gradients and optimizer state;
the frozen base lies sharded beside them. The adapters are saved as PeftModel.from_pretrained() opens them, and merged
into the base: both have the loss that the sharded model had.

Needs `pip install peft`.
"""

import importlib.util
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import transformers
from common import cycle, is_master, make_config, make_parser, parse, say, write_metrics
from corpus import blocks_of
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import torchacc
from torchacc.train.corpus import stdlib_documents
from torchacc.train.tokens import train_tokenizer

VOCAB_SIZE = 1024
HELD_OUT_EVERY = 5  # every so many-th topic of the manual is kept for evaluation
HELD_OUT_BLOCKS = 128


def main() -> None:
    """Train a base and adapters, save these, open them with peft, merge them."""
    parser = make_parser(__doc__, steps=150, batch_size=16, lr=5e-3, out="runs/lora")
    parser.add_argument("--base", help="a causal language model to adapt (default: a small Llama, trained first)")
    parser.add_argument("--base-steps", type=int, default=150)
    parser.add_argument("--context", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--layers", type=int, default=2, help="of the small Llama")
    parser.add_argument("--files", type=int, default=100, help="that the small Llama reads at most")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    args = parse(parser)
    if importlib.util.find_spec("peft") is None:
        parser.error("the adapters are peft's, which is not installed: `pip install peft`")
    from peft import LoraConfig, PeftModel, get_peft_model

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    base = args.base or train_base(args)
    torch.manual_seed(0)  # the adapters start alike, however many batches this process has drawn
    tokenizer = AutoTokenizer.from_pretrained(base)
    train, held_out = manual(tokenizer, args.context)

    adapters = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), adapters)
    per_device = args.batch_size // args.devices
    loader = DataLoader(train, batch_size=per_device, shuffle=True, drop_last=True)
    model, loader = torchacc.accelerate(model, loader, make_config(args))
    held_out_loader = torchacc.shard_loader(DataLoader(held_out, batch_size=per_device), model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr)
    say(str(torchacc.describe(model)))
    before = evaluate(model, held_out_loader)
    losses = fit(model, optimizer, loader, args.steps)
    after = evaluate(model, held_out_loader)
    say(f"manual      loss {before:.4f} with the base alone, {after:.4f} with adapters, on topics never seen")

    weights = torchacc.full_state_dict(model, rank0_only=True)
    if is_master():
        folder = args.out / "adapters"
        model.save_pretrained(folder, state_dict=weights)  # the adapters alone
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        opened = plain_loss(plain, held_out, args.batch_size)
        merged = plain_loss(plain.merge_and_unload(), held_out, args.batch_size)
        say(f"opened      loss {opened:.4f} with PeftModel.from_pretrained({str(folder)!r}), {merged:.4f} merged")
        results = {"untrained": before, "trained": after, "opened": opened, "merged": merged}
        write_metrics(args.out, {"losses": losses, **results})


def train_base(args: Any) -> Path:
    """Train a small Llama on the standard library, and return the folder that it is saved in."""
    documents = stdlib_documents()[: args.files]
    tokenizer = train_tokenizer(documents, VOCAB_SIZE)
    tokens = tokenizer("".join(documents), return_tensors="pt", verbose=False)["input_ids"][0]
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=args.layers, **shape))
    blocks = blocks_of(tokens, args.context)
    loader = DataLoader(blocks, batch_size=args.batch_size // args.devices, shuffle=True, drop_last=True)
    model, loader = torchacc.accelerate(model, loader, make_config(args))
    fit(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loader, args.base_steps)
    torchacc.checkpoint.save(args.out / "base", model=model, tokenizer=tokenizer)
    return args.out / "base"


def manual(tokenizer: transformers.PreTrainedTokenizerBase, length: int) -> tuple[list[Any], list[Any]]:
    """Return the language reference that comes with Python, in blocks: topics to learn from, and those held out."""
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train, rest = (torch.tensor(tokenizer("".join(part), verbose=False)["input_ids"]) for part in (texts, held_out))
    return blocks_of(train, length), blocks_of(rest, length, limit=HELD_OUT_BLOCKS)


def fit(model: Any, optimizer: torch.optim.Optimizer, loader: Iterable[Any], steps: int) -> list[float]:
    """Take optimizer steps, and return the loss of each."""
    losses, started = [], time.perf_counter()
    model.train()
    for step, batch in enumerate(islice(cycle(loader), steps), start=1):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % 50 == 0 or step == steps:
            say(f"step {step:4}   loss {loss.item():.4f}   {time.perf_counter() - started:.0f} s")
    return [loss.item() for loss in losses]


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[dict[str, torch.Tensor]]) -> float:
    """Return the mean loss over a loader."""
    model.eval()
    return torch.stack([model(**batch).loss for batch in loader]).mean().item()


def plain_loss(model: nn.Module, examples: list[Any], batch_size: int) -> float:
    """Return the mean loss of an unsharded model."""
    return evaluate(model, DataLoader(examples, batch_size=batch_size))


if __name__ == "__main__":
    main()
