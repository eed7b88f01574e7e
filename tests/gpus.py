"""This machine's NVIDIA GPUs, for tests that are marked `gpu`; and how their way is gone where there are none.

    TORCHACC_TEST_GPU=cpu python -m pytest -m gpu tests/contract/test_gpu.py

runs the contract's tests on GPUs with the CPU in their place: their launches, their ranks that believe to be on
machines of their own, and all comparisons. It says nothing about a GPU.
"""

import importlib.util
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.accelerators import GIVEN_FLAGS

SWITCH = "TORCHACC_TEST_GPU"
SHOWN = "TORCHACC_TEST_SHOWN_GPUS"
"""The variable with what `CUDA_VISIBLE_DEVICES` was before the tests hid all GPUs."""
_HIDES = "CUDA_VISIBLE_DEVICES"


def hide() -> None:
    """Let this process and those that it starts find no GPU: tests are about the CPU where they do not say otherwise.

    A process that has looked for one could fork none that computes.
    """
    os.environ.setdefault(SHOWN, os.environ.get(_HIDES, "all"))
    os.environ.setdefault(GIVEN_FLAGS, os.environ.get("XLA_FLAGS", ""))
    os.environ[_HIDES] = ""


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process finds the GPUs, or none where the CPU stands for one."""
    if kind() == "cpu":
        return dict(environment)
    found = {name: value for name, value in environment.items() if name != _HIDES}
    found["XLA_FLAGS"] = environment.get(GIVEN_FLAGS, "")
    devices = environment.get(SHOWN, "all")
    return found if devices == "all" else found | {_HIDES: devices}


def under_xla(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a process drives the GPUs with XLA, or the CPU that stands for one."""
    return shown(environment) | {"PJRT_DEVICE": "CPU" if kind() == "cpu" else "CUDA"}


def why_not_xla() -> str:
    """Return why tests of GPUs under XLA are skipped; nothing where they run."""
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    from torchacc.engines.xla import cuda

    has_plugin = kind() == "cpu" or cuda.installed_plugin() is not None
    return why_not() or ("" if has_plugin else "pip install 'torchacc[xla-cuda]'")


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
    machine of its own with a single card, and they meet over gloo, which copies by the host where it knows how to.
    """
    import torch

    torch.backends.cudnn.allow_tf32 = False  # convolutions are compared with those of the CPU
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks > 1 and (kind() == "cpu" or num_ranks > count()):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        backends = dict.fromkeys(("cpu", kind()), "gloo")
        torch.distributed.init_process_group(",".join(f"{device}:{name}" for device, name in backends.items()))
        _go_by_the_host()


def _go_by_the_host() -> None:
    """Let go by the host what gloo would read at a GPU's address as if it were the host's, which ends the process."""
    import torch
    import torch.distributed as dist

    send, receive = dist.isend, dist.recv

    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = tensor.cpu()
        work = send(host, *args, **kwargs)
        _sent.append((work, host))
        return work

    def recv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        host = torch.empty_like(tensor, device="cpu")
        source = receive(host, *args, **kwargs)
        tensor.copy_(host)
        return source

    def all_gather(tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
        whole = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
        group = dist.distributed_c10d._resolve_process_group(name)
        dist.all_gather_into_tensor(whole, tensor.contiguous(), group=group)
        return whole

    def all_gather_several(tensors: list[torch.Tensor], size: int, name: str) -> list[torch.Tensor]:
        return [all_gather(tensor, size, name) for tensor in tensors]

    dist.isend, dist.recv = isend, recv
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", all_gather, "CUDA")
    library.impl("all_gather_into_tensor_coalesced", all_gather_several, "CUDA")
    _libraries.append(library)


_sent: deque[Any] = deque(maxlen=1000)
"""What gloo reads until it has been sent."""
_libraries: list[Any] = []
"""What the functional collectives do, for as long as the process lives."""
