"""Run by test_splash_attention.py in its own process: a Llama on two devices by the kernel's interpreter, and whole.

Prints for a plain batch and packed documents, also in a loop over the layers, the losses of two steps, the gradient
norms, the largest difference between the parameters, and how often the kernel was in the programs.
"""

import copy
import json
import os

os.environ |= {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torchacc
from torchacc.engines.patches import splash_attention
from torchacc.engines.xla.spmd import SpmdEngine

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def trained(model, batch, optimizer, clip):
    found = []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        found.append([float(loss.detach()), float(norm)])
    return found


def compare(batch, *, scan_layers=False):
    calls.clear()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, use_cache=False)).train()
    expected = copy.deepcopy(model)
    config = torchacc.Config(backend="xla")
    config.dist.fsdp.size, config.dist.fsdp.use_spmd = 2, True
    config.compute.attention = "flash"
    config.memory.gc, config.compute.scan_layers = not scan_layers, scan_layers  # a loop computes its layers again
    model = torchacc.accelerate(model, None, config)
    ours = trained(model, batch, torch.optim.SGD(model.parameters(), 0.1), lambda: model.clip_grad_norm_(1.0))
    parameters = list(expected.parameters())
    plain = trained(
        expected, batch, torch.optim.SGD(parameters, 0.1), lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    )
    after = torchacc.full_state_dict(model)
    difference = max(float((after[name] - value).abs().max()) for name, value in expected.state_dict().items())
    return {"ours": ours, "plain": plain, "difference": difference, "calls": list(calls)}


calls, own = [], splash_attention._run
splash_attention.interpreted = True
splash_attention._run = lambda direction, *others: calls.append(direction) or own(direction, *others)
SpmdEngine.has_tpu_kernels = property(lambda self: True)
tokens = torch.randint(0, 64, (2, 128), generator=torch.Generator().manual_seed(0))
documents = torch.stack([torch.arange(128) % 48, torch.arange(128) % 100])
batch = {"input_ids": tokens, "labels": tokens}
packed = {**batch, "position_ids": documents}
cases = {"plain": compare(batch), "packed": compare(packed), "packed, in a loop": compare(packed, scan_layers=True)}
print(json.dumps(cases))
