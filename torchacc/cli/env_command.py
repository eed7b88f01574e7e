"""Print what a bug report needs: versions, devices, and which engines can run here, by `torchacc env`."""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchacc.config import Config
from torchacc.engines import attention_kernels, registry
from torchacc.engines.process_group import accelerator_kind
from torchacc.engines.registry import survey
from torchacc.env import SCHEDULERS, installed_version, read_job, with_prefixes
from torchacc.errors import ConfigError

_PACKAGES = (
    "torchacc", "torch", "torch_xla", "transformers", "tokenizers", "datasets", "safetensors", "numpy", "pydantic",
    "accelerate", "peft", "trl", "lightning", "torchao", "triton", "flash-attn", "flash-attn-3", "flash-attn-4",
    "jax-cuda12-pjrt", "jax-cuda13-pjrt", "libtpu", "jaxlib", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
_VARIABLES = (
    "TORCH", "PYTORCH_", "XLA_", "PJRT_", "TPU_", "LIBTPU_", "NCCL_", "GLOO_", "CUDA_", "NVIDIA_VISIBLE", "HF_",
    "USE_TORCH", "TRANSFORMERS_", "TOKENIZERS_", "OMP_", "MKL_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_",
    "PYTHON", *sorted({f"{name.split('_')[0]}_" for each in SCHEDULERS for name in (each.rank, *each.job)}),
)  # fmt: skip
"""Beginnings of the names of variables that change how a training runs."""
_GPU_QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader")
EXAMPLES = ("torchacc env", "torchacc env --json")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what was found, and return the exit status."""
    found = _find()
    sys.stdout.write((json.dumps(found, indent=2) if args.json else _describe(found)) + "\n")
    return 0


def _find() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torchacc_at": str(Path(__file__).parents[1]),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "variables": with_prefixes(*_VARIABLES),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "engines": [asdict(finding) for finding in survey()],
        "auto": _auto(),
        "attention": [
            asdict(finding) for finding in attention_kernels.survey(torch.device(accelerator_kind() or "cpu"))
        ],
    }


def _gpus() -> list[str]:
    """Return what NVIDIA's driver says of each GPU, without starting CUDA in this process."""
    try:
        done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _auto() -> str:
    try:
        return registry.choose(Config(), read_job()).engine
    except ConfigError as error:
        return f"none: {error}"


def _variables(found: dict[str, str]) -> list[str]:
    return [f"  {name}={value}" for name, value in found.items()] or ["  none of those that change a training"]


def _describe(found: dict[str, Any]) -> str:
    rows = [(name, str(found[name])) for name in ("python", "system", "cores")]
    rows += [("memory", f"{found['memory_bytes'] / 2**30:.1f} GiB"), ("torchacc is at", found["torchacc_at"])]
    rows += [("CUDA of torch", found["cuda"] or "none"), *(("GPU", gpu) for gpu in found["gpus"] or ["none found"])]
    rows += [(name, version) for name, version in found["packages"].items() if version]
    absent = [name for name, version in found["packages"].items() if not version]
    rows += [("not installed", ", ".join(absent))] if absent else []
    lines = [f"{name:<16}  {value}" for name, value in rows]
    lines += ["", "variables", *_variables(found["variables"])]
    lines += ["", "engines"]
    for engine in found["engines"]:
        lines.append(f"  {engine['name']:<16}  {'runs on ' + engine['devices'] if engine['devices'] else 'cannot run'}")
        lines += [f"      {engine['reason']}"] if engine["reason"] else []
    lines += [f"  config.backend = {Config().backend!r} takes {found['auto']}", "", "attention, natively"]
    for kernel in found["attention"]:
        reason = kernel["reason"]
        lines.append(f"  {kernel['name']:<18}{'can run' if reason is None else f'cannot run: {reason}'}")
    return "\n".join(lines)
