"""Run by test_random_lowerings.py in its own process, with a number of devices: what dropout draws on them."""

import json
import os
import re
import sys

os.environ |= {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import torchacc
from torchacc.engines.patches import counter_random

NUM_DEVICES = int(sys.argv[1])
SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
SHARES = {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3}


def accelerated(model, **memory):
    config = torchacc.Config.from_dict(
        {"backend": "xla", "dist": {"fsdp": {"size": NUM_DEVICES, "use_spmd": True}}, "memory": memory}
    )
    return torchacc.accelerate(model, None, config)


def drawn(operation):
    """Return the shapes of the random bits in the program that computes a tensor."""
    from torch_xla import _XLAC

    text = _XLAC._get_xla_tensors_hlo([operation])
    return re.findall(r"\((?:u64\[2\][^,]*, )(\w+\[[\d,]*\])\S* rng-bit-generator", text)


def losses(*, seed, recomputes, attention):
    """Train GPT-2 with dropout for some steps."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZES, **SHARES, bos_token_id=None, eos_token_id=None, use_cache=False))
    model.set_attn_implementation(attention)
    model = accelerated(model.train(), gc=recomputes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    inputs = [each.clone() for each in (tokens, tokens)]
    torchacc.engines.registry.active_engine().seed(seed)
    found, graphs, shapes = [], [], []
    for _ in range(4):
        ids, labels = torchacc.engines.registry.active_engine().to_device(inputs)
        loss = model(input_ids=ids, labels=labels).loss
        shapes = shapes or drawn(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        graphs.append(torchacc.compile_report().graphs)
    return {"losses": found, "graphs": graphs, "shapes": shapes}


OPERATIONS = {
    "dropout": lambda x: F.dropout(x, 0.25),
    "in_place": lambda x: F.dropout(x.clone(), 0.25, inplace=True),
    "of_channels": lambda x: F.dropout1d(x, 0.25),
    "native": lambda x: torch.native_dropout(x, 0.25, True)[0],
    "alpha": lambda x: F.alpha_dropout(x, 0.25, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.25),
    "bernoulli": lambda x: torch.empty_like(x).bernoulli_(0.75),
    "bernoulli_of_each": lambda x: torch.bernoulli(torch.full_like(x, 0.75)),
    "bernoulli_like": lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.75)),
}


def operations(device):
    found = {}
    for name, operation in OPERATIONS.items():
        x = torch.ones(64, 64, 64, device=device, requires_grad=True)
        y = operation(x)
        found[name] = {"drawn": drawn(y), "kept": (y != 0).float().mean().item(), "mean": y.mean().item()}
    for name in ("dropout", "in_place", "native"):
        x = torch.ones(64, 64, device=device, requires_grad=True)
        y = OPERATIONS[name](x)
        y.sum().backward()
        found[name]["gradient_is_the_mask"] = torch.equal(x.grad.cpu(), y.detach().cpu())
    with_nan = torch.full((64, 64), torch.nan, device=device)
    found["dropout"]["keeps_nan"] = bool(F.dropout(with_nan, 0.25).isnan().all())
    found["dropout"]["all_or_nothing"] = [F.dropout(torch.ones(8, device=device), p).sum().item() for p in (0.0, 1.0)]
    found["dropout"]["in_eval"] = F.dropout(torch.ones(8, device=device), 0.5, training=False).sum().item()
    return found


def bits(device):
    """Return what the hash gives for the published keys and counters, and statistics of two masks."""
    key = torch.zeros(2, dtype=torch.int32, device=device)
    masks = [counter_random.bernoulli((512, 512), 0.3, device).double().cpu() - 0.3 for _ in range(2)]
    one, other = masks
    numbers = counter_random.uniform((512, 512), device).double().cpu()
    products = {
        "rows": one[1:] * one[:-1],
        "columns": one[:, 1:] * one[:, :-1],
        "calls": one * other,
        "shifted_calls": one[:, 1:] * other[:, :-1],
        "halves": one[:256] * one[256:],
    }
    flat = counter_random.bits(key, (24,)).cpu()
    return {
        "first": counter_random.bits(key, (1,)).cpu().item() % 2**32,
        "is_of_places": torch.equal(flat.view(2, 3, 4), counter_random.bits(key, (2, 3, 4)).cpu()),
        "mean": one.mean().item(),
        "variance": one.square().mean().item(),
        "row_variance": one.mean(1).var().item() * 512,
        "products": {name: each.mean().item() for name, each in products.items()},
        "uniform": [numbers.mean().item(), numbers.var().item(), numbers.min().item(), numbers.max().item()],
    }


def main():
    found = {"plain": losses(seed=3, recomputes=False, attention="sdpa")}
    if NUM_DEVICES > 1:
        found["recomputed"] = losses(seed=3, recomputes=True, attention="sdpa")
        found["eager"] = losses(seed=4, recomputes=False, attention="eager")
    else:
        device = torch.device("xla:0")
        found |= {"operations": operations(device), "bits": bits(device)}
        masks = []
        model = accelerated(nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)))
        for _ in range(3):
            masks.append((model(torch.ones(4, 8, device=device)) == 0).flatten().tolist())
        found["masks"] = masks
    print(json.dumps(found))


main()
