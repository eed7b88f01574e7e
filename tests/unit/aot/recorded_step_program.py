"""Run by test_recorded_step.py in its own process: the program of a real step on two devices, and the recorded one."""

import copy
import json
import os
import re
from collections import Counter

os.environ |= {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import torchacc
from torchacc.aot.recorded_step import record_step
from torchacc.engines.xla.recording import RecordingEngine
from torchacc.engines.xla.spmd import SpmdEngine

SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}


def configured(**compute):
    config = torchacc.Config()
    config.backend = "xla"
    config.dist.fsdp.size, config.dist.fsdp.use_spmd = 2, True
    config.compute.bf16, config.compute.attention = True, "sdpa"  # which is the same on TPUs
    for name, value in compute.items():
        setattr(config.compute, name, value)
    config.memory.gc = not config.compute.scan_layers
    return config


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def operations(text):
    """Return how often each operation is in a program, by what it returns."""
    found = re.findall(r"^\s+(?:ROOT )?%\S+ = (\S+) ([\w\-]+)\(", text, re.M)
    plain = [(re.sub(r"\{[\d,]*\}$", "", shape), op) for shape, op in found]
    return Counter(f"{op} {shape}" for shape, op in plain if op != "tuple")


def real_step(model, batch):
    """Return the operations of a step's program on this machine."""
    from torch_xla import _XLAC

    model = torchacc.accelerate(model, None, configured())
    optimizer = optimizer_of(model.parameters())
    texts = []
    own = SpmdEngine.sync

    def sync(engine):
        state = [value for each in optimizer.state.values() for value in each.values() if value.device.type == "xla"]
        if engine.has_recorded:
            texts.append(_XLAC._get_xla_tensors_hlo([loss.detach(), *model.parameters(), *state]))
        own(engine)

    SpmdEngine.sync = sync
    loss = model(**batch).loss
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    SpmdEngine.sync = own
    return operations(texts[-1])


def main():
    config = GPT2Config(**SIZES, bos_token_id=None, eos_token_id=None, use_cache=False)
    with torch.device("meta"):
        without_values, looped = (GPT2LMHeadModel(copy.deepcopy(config)).train() for _ in range(2))
    tokens = torch.randint(0, 64, (4, 16))
    real = real_step(GPT2LMHeadModel(copy.deepcopy(config)).train(), {"input_ids": tokens, "labels": tokens})
    batch = {"input_ids": tokens.to("meta"), "labels": tokens.to("meta")}
    from torch_xla import _XLAC

    RecordingEngine.drops_barriers = SpmdEngine.drops_barriers  # as the real step was compiled for this machine
    texts, own = [], _XLAC._get_xla_tensors_hlo_proto
    _XLAC._get_xla_tensors_hlo_proto = lambda tensors: texts.append(_XLAC._get_xla_tensors_hlo(tensors)) or own(tensors)
    program = record_step(without_values, batch, configured(), optimizer_of, num_devices=2, platform="TPU", clips=True)
    shardings = Counter((each.sharding, each.is_donated) for each in program.inputs)
    found = {
        "real": real,
        "recorded": operations(texts[0]),
        "inputs": [[*key, count] for key, count in shardings.items()],
        "parameters": len(list(without_values.parameters())),
        "names": sorted(set(re.findall(r'op_name="[^"]*?(transformer\.h\.1\.mlp)[.\d]*/', texts[0]))),
    }
    record_step(looped, batch, configured(scan_layers=True), optimizer_of, num_devices=2, platform="TPU")
    found["loops"] = re.findall(r" = \((\w+)\[\].* while\(", texts[-1])
    print(json.dumps(found))


main()
