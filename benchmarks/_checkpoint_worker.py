"""One run of one case of `checkpoint.py`, in a process of its own; and the making of the files."""

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from math import prod
from pathlib import Path

import torch
from _checkpoint_cases import RANKS, UNIT_SHAPES

NUMEL = sum(prod(shape) for shape in UNIT_SHAPES.values())
SHARD_NUMEL = -(-NUMEL // (RANKS * 128)) * 128


def make_files(folder: Path, units: int) -> None:
    """Write what torch_xla's FSDP saves on each rank: the shards of a flattened model, and of its AdamW."""
    for rank in range(RANKS):
        torch.save(_rank_file(rank, units), folder / f"rank-{rank}-of-{RANKS}.pth")


def run(case: str, folder: Path, target: Path) -> None:
    """Put the model together once, and print the time, the memory and a digest of the result as JSON."""
    consolidate = FUNCTIONS[case]()
    base = _forget_peak()
    cpu, started = time.process_time(), time.perf_counter()
    consolidate(folder, target)
    measured = {
        "secs": time.perf_counter() - started,
        "cpu_secs": time.process_time() - cpu,
        "extra_bytes": _memory("VmHWM") - base,
        "digest": _digest(target),
    }
    sys.stdout.write(json.dumps(measured) + "\n")


def _torchacc(verify: bool = False) -> Callable[[Path, Path], None]:
    from torchacc.checkpoint.other_formats.rank_conversion import consolidate_sharded_model_checkpoints

    def consolidate(folder: Path, target: Path) -> None:
        consolidate_sharded_model_checkpoints(str(folder), "rank-*.pth", str(target), verify=verify)

    return consolidate


def _torch_xla() -> Callable[[Path, Path], None]:
    os.environ.setdefault("PJRT_DEVICE", "CPU")  # noqa: TID251
    from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

    def consolidate(folder: Path, target: Path) -> None:
        with redirect_stdout(StringIO()):  # it prints
            consolidate_sharded_model_checkpoints(f"{folder}/", "rank-*.pth", str(target))

    return consolidate


FUNCTIONS: dict[str, Callable[[], Callable[[Path, Path], None]]] = {
    "torchacc": _torchacc,
    "torchacc, verified": lambda: _torchacc(verify=True),
    "torch_xla": _torch_xla,
}


def _rank_file(rank: int, units: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(rank)
    model, shard_info, flatten_info, state = {}, {}, {}, {}
    flat = "_fsdp_wrapped_module.flat_param_0"
    suffix = f"_fsdp_shard.{flat}".replace(".", "_FSDP_SHARD_SEPARATOR_")
    shapes = [list(shape) for shape in UNIT_SHAPES.values()]
    for unit in range(units):
        prefix = f"_fsdp_wrapped_module.layers.{unit}"
        model[f"{prefix}.{suffix}"] = torch.randn(SHARD_NUMEL, generator=generator)
        moments = (torch.rand(SHARD_NUMEL, generator=generator) for _ in range(2))
        state[unit] = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True)) | {"step": torch.tensor(3.0)}
        shard_info[prefix] = {suffix: {"_orig_size": [NUMEL], "_orig_name": flat}}
        names = [f"_fpw_module.{name}" for name in UNIT_SHAPES]
        flatten_info[f"{prefix}.{flat}"] = [names, shapes, [prod(shape) for shape in shapes]]
    info = {"shard_info": shard_info, "flatten_info": flatten_info, "buffer_info": {}}
    return {
        "model": model,
        "optimizer": {"state": state, "param_groups": [{"lr": 1e-3, "params": list(range(units))}]},
        "shard_metadata": {**info, "world_size": RANKS, "rank": rank},
    }


def _forget_peak() -> int:
    """Return the memory in use, and let the system measure the peak from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def _digest(path: Path) -> int:
    digest = 0
    for name, tensor in sorted(torch.load(path, mmap=True, weights_only=True)["model"].items()):
        digest = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest)
        digest = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy(), digest)
    return digest
