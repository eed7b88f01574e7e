import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# torch comes first: what its own import does is not ours to answer for.
PROBE = """
import os, sys, threading
import torch

environment, threads = dict(os.environ), threading.active_count()
import torchacc

assert dict(os.environ) == environment, "import torchacc changed the environment"
assert threading.active_count() == threads, "import torchacc started a thread"
assert not torch.distributed.is_initialized(), "import torchacc started a process group"
assert not torch.cuda.is_initialized(), "import torchacc started a device"
loaded = {"torch_xla", "transformers", "datasets", "accelerate"} & sys.modules.keys()
assert not loaded, f"import torchacc loaded {sorted(loaded)}"
"""


def test_importing_the_package_does_nothing():
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
