"""The environment in which workers of the contract run."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

# LLVM takes half of the time of XLA's compiles, to optimize machine code that runs a few times. All before it is as
# without: XLA's own passes, partitioning, schedule, buffers. The other tests compile as users do.
_QUICK_COMPILES = "--xla_backend_optimization_level=0"


def environment(*xla_flags: str, **variables: str) -> dict[str, str]:
    """Return variables with this checkout, no network and quick compiles; flags of the user's come after ours."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    flags = " ".join(filter(None, [_QUICK_COMPILES, os.environ.get("XLA_FLAGS"), *xla_flags]))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "XLA_FLAGS": flags} | variables
