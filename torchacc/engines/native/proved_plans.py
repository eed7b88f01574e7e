"""Families whose own plan for splitting layers is known to compute the unsharded numbers."""

import json
import zlib

from torch import nn

from torchacc.parallel.tensor_parallel import find_config

PLANS: dict[str, str] = {}
"""transformers' `model_type` -> `fingerprint()` of the plan that a model declared when its training was compared with
that of the unsharded model. docs/tensor_parallel.md has all that were tried; with that page this is written."""


def fingerprint(model: nn.Module) -> str:
    """Return a short mark of what a transformers model declares for its tensor parallelism."""
    declared = getattr(find_config(model), "base_model_tp_plan", None) or {}
    return f"{zlib.crc32(json.dumps(declared, sort_keys=True).encode()):08x}"
