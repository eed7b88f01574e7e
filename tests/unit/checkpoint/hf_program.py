"""Load a Hugging Face checkpoint into a sharded model that was built on the meta device, and save it again.

hf_program.py <config as JSON> <folder of the checkpoint> <new folder>
"""

import json
import sys

import torch
import transformers

import torchacc

given, source, target = sys.argv[1:]
hub_config = transformers.AutoConfig.from_pretrained(source)
hub_config._experts_implementation = "batched_mm"
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(hub_config)
model = torchacc.accelerate(model, config=torchacc.Config.from_dict(json.loads(given)))
torchacc.checkpoint.load(source, model=model)
ids = torch.arange(12).reshape(2, 6) % hub_config.vocab_size
loss = model(input_ids=model._torchacc.engine.to_device(ids), labels=model._torchacc.engine.to_device(ids)).loss
print(f"LOSS {loss.item()}", flush=True)
torchacc.checkpoint.save(target, model=model)
