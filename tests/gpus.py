"""This machine's NVIDIA GPUs, for tests that are marked `gpu`; and how their way is gone where there are none.

    TORCHACC_TEST_GPU=cpu python -m pytest -m gpu tests/contract/test_gpu.py

runs the contract's tests on GPUs with the CPU in their place: their launches, their ranks that believe to be on
machines of their own, and all comparisons. It says nothing about a GPU.
"""

import os
from pathlib import Path

SWITCH = "TORCHACC_TEST_GPU"


def count() -> int:
    """Return the number of GPUs, without starting CUDA."""
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def kind() -> str | None:
    """Return the type of device that stands for a GPU; None where there is none."""
    return os.environ.get(SWITCH) or ("cuda" if count() else None)


def why_not() -> str:
    """Return why tests of GPUs are skipped; nothing where they run."""
    return "" if kind() else f"this machine has no NVIDIA GPU ({SWITCH}=cpu goes the same way on the CPU)"


def join() -> None:
    """Give this rank a GPU of its own, or its share of the only one, before torchacc looks.

    NCCL refuses two ranks on one card, and torchacc more ranks than a machine has cards. So each believes to be on a
    machine of its own with a single card, and they meet over gloo, which copies by the host.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = False  # convolutions are compared with those of the CPU
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1 and (kind() == "cpu" or num_ranks > count()):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        backends = dict.fromkeys(("cpu", kind()), "gloo")
        torch.distributed.init_process_group(",".join(f"{device}:{name}" for device, name in backends.items()))
