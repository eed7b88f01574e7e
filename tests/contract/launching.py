"""The environment in which workers of the contract run."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(*xla_flags: str, **variables: str) -> dict[str, str]:
    """Return the variables, with this checkout and no network, and with more flags of XLA's."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    flags = " ".join([os.environ["XLA_FLAGS"], *xla_flags])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "XLA_FLAGS": flags} | variables
