"""Run by test_cuda.py in a process of its own: asks for XLA on an NVIDIA GPU, and prints how that ended.

python cuda_program.py spmd|one [fraction]
"""

import json
import sys

from torch import nn

import torchacc
from torchacc.engines import registry

mode, *rest = sys.argv[1:]
config = torchacc.Config(backend="xla")
config.dist.fsdp.use_spmd = mode == "spmd"
config.memory.gpu_fraction = float(rest[0]) if rest else None
found = {}
try:
    torchacc.accelerate(nn.Linear(4, 4), config=config)
except Exception as error:
    found |= {"error": type(error).__name__, "message": str(error)}
engine = registry.active_engine()
found["devices"] = None if engine is None else str(engine.device)
print("\n" + json.dumps(found), flush=True)
