"""Print versions and devices, and which engines can run here: `torchacc env`."""

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch

from torchacc.config import Config
from torchacc.engines import attention_kernels, registry
from torchacc.engines.process_group import accelerator_kind
from torchacc.engines.registry import survey
from torchacc.env import installed_version, read_job
from torchacc.errors import ConfigError

_PACKAGES = (
    "torchacc", "torch", "torch_xla", "transformers", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "datasets", "safetensors",
    "torchao", "flash-attn", "flash-attn-3", "flash-attn-4",
)  # fmt: skip
EXAMPLES = ("torchacc env", "torchacc env --json")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


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
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "engines": [asdict(finding) for finding in survey()],
        "auto": _auto(),
        "attention": [
            asdict(finding) for finding in attention_kernels.survey(torch.device(accelerator_kind() or "cpu"))
        ],
    }


def _auto() -> str:
    try:
        return registry.choose(Config(), read_job()).engine
    except ConfigError as error:
        return f"none: {error}"


def _describe(found: dict[str, Any]) -> str:
    rows = [("python", found["python"]), ("system", found["system"]), ("cores", str(found["cores"]))]
    rows += [(name, version or "not installed") for name, version in found["packages"].items()]
    lines = [f"{name:<16}  {value}" for name, value in rows]
    lines += ["", "engines"]
    for engine in found["engines"]:
        lines.append(f"  {engine['name']:<16}  {'runs on ' + engine['devices'] if engine['devices'] else 'cannot run'}")
        lines += [f"      {engine['reason']}"] if engine["reason"] else []
    lines += [f"  config.backend = {Config().backend!r} takes {found['auto']}", "", "attention, natively"]
    for kernel in found["attention"]:
        reason = kernel["reason"]
        lines.append(f"  {kernel['name']:<18}{'can run' if reason is None else f'cannot run: {reason}'}")
    return "\n".join(lines)
