"""Rank files of a small model, as each kind of ranks saves them, and calls that the tests of them share."""

import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchacc.checkpoint.other_formats.conversion import execute
from torchacc.checkpoint.other_formats.rank_conversion import (
    plan_conversion,
)

SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
OURS = ["rows", "rows-left-out", "flat"]
TORCH_XLA = ["xla-flat", "xla", "xla-dim0"]
STYLES = OURS + TORCH_XLA
UNITS = {"": ["wte.weight", "frozen"], "h.0": ["w", "b"], "h.1": ["w", "b"]}
SHAPES = {"wte.weight": (37, 5), "frozen": (3,), "h.0.w": (4, 6, 2), "h.0.b": (7,), "h.1.w": (4, 6, 2), "h.1.b": (7,)}
FROZEN = {"frozen"}


@dataclass
class Made:
    """A model with its optimizer, whole, and how to save it as ranks do."""

    style: str
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: int = 1

    def save(self, folder: Path, world: int, *, separate: bool = True, **metadata: Any) -> list[Path]:
        """Write the files of all ranks, and return them."""
        folder.mkdir(exist_ok=True)
        paths = []
        for rank in range(world):
            content = self.rank_file(rank, world, **metadata)
            if separate:
                optimizer = {key: content[key] for key in ("optimizer", "shard_metadata")}
                del content["optimizer"]
                torch.save(optimizer, folder / f"rank-{rank}-of-{world}-optimizer.pth")
            paths.append(folder / (f"rank-{rank}-of-{world}-model.pth" if separate else f"rank-{rank}-of-{world}.pth"))
            torch.save(content, paths[-1])
        return paths

    def rank_file(self, rank: int, world: int, **metadata: Any) -> dict[str, Any]:
        model, shard_info, flatten_info, moments = {}, {}, {}, {}
        for unit, names in UNITS.items():
            prefix = self.wrapped(unit)
            shard_info[prefix] = {}
            for own_name, members in self.blocks(unit, names).items():
                suffix = self.suffix(own_name)
                key = f"{prefix}.{suffix}" if prefix else suffix
                full_names = [f"{unit}.{name}" if unit else name for name in members]
                tensors = [self.params[name] for name in full_names]
                whole = torch.cat([t.reshape(-1) for t in tensors]) if "flat" in self.style else tensors[0]
                shard_info[prefix][suffix] = {"_orig_size": list(whole.shape), "_orig_name": own_name}
                if "flat" in self.style:
                    inner = "_fpw_module." if "xla" in self.style else ""
                    flat = f"{prefix}.{own_name}" if prefix else own_name
                    shapes = [list(t.shape) for t in tensors]
                    flatten_info[flat] = [[inner + n for n in members], shapes, [t.numel() for t in tensors]]
                model[key] = self.shard(whole, rank, world)
                moment = torch.cat([self.moments[name].reshape(-1) for name in full_names]).view(whole.shape)
                if not FROZEN & set(full_names):
                    moments[key] = self.shard(moment, rank, world)
        keys = [f"{prefix}.{suffix}" if prefix else suffix for prefix in shard_info for suffix in shard_info[prefix]]
        if "rows" in self.style:  # a state dict has both names of what is tied
            model = {"lm_head.weight": model["wte.weight"], **model}
        model |= {self.buffer_key(name): buffer for name, buffer in self.buffers.items()}
        metadata = {"shard_info": shard_info, "flatten_info": flatten_info, "buffer_info": {}, **metadata}
        metadata |= {"world_size": world, "rank": rank}
        if self.style in OURS:
            ours = {"replica": 0, "tied": {"lm_head.weight": "wte.weight"}, "parameters": list(SHAPES), "save_id": "1"}
            metadata = ours | metadata
        return {"model": model, "optimizer": self.optimizer(keys, moments), "shard_metadata": metadata, "epoch": 3}

    def blocks(self, unit: str, names: list[str]) -> dict[str, list[str]]:
        wrapper = {"xla-flat": "_fsdp_wrapped_module.", "xla": "_fsdp_wrapped_module._fpw_module."}.get(self.style)
        wrapper = "_fsdp_wrapped_module." if self.style == "xla-dim0" else wrapper or ""
        if "flat" not in self.style:
            return {wrapper + name: [name] for name in names}
        groups = [[n for n in names if n not in FROZEN], [n for n in names if n in FROZEN]]
        return {f"{wrapper}flat_param_{i}": group for i, group in enumerate(groups) if group}

    def wrapped(self, unit: str) -> str:
        return f"_fsdp_wrapped_module.{unit}" if unit and "xla" in self.style else unit

    def suffix(self, name: str) -> str:
        return f"_fsdp_shard.{name}".replace(".", SEPARATOR) if "xla" in self.style else name

    def buffer_key(self, name: str) -> str:
        return f"_fsdp_wrapped_module.{name}" if "xla" in self.style else name

    def shard(self, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        if self.style in ("xla-flat", "xla"):
            whole, multiple = whole.reshape(-1), world * 128
        else:
            multiple = world
        padded = torch.cat([whole, whole.new_zeros(-len(whole) % multiple, *whole.shape[1:])])
        shard = padded.chunk(world)[rank]
        if self.style == "rows-left-out":
            shard = shard[: max(0, len(whole) - rank * len(shard))]
        return shard.clone()

    def optimizer(self, keys: list[str], moments: dict[str, torch.Tensor]) -> dict[str, Any]:
        ids = {key: index for index, key in enumerate(keys)}
        chosen = [keys[index :: self.groups] for index in range(self.groups)]
        step = torch.tensor(11.0)  # one for all: as it may be saved, and must not be loaded
        groups: list[dict[str, Any]] = [
            {"lr": 0.1 * index, "betas": (0.9, 0.99), "params": [ids[key] for key in own]}
            for index, own in enumerate(chosen)
        ]
        if self.style in OURS or self.groups > 1:
            for group, own in zip(groups, chosen, strict=True):
                group["param_names"] = own
        state = {ids[key]: {"step": step, "exp_avg": moment} for key, moment in moments.items()}
        return {"state": state, "param_groups": groups}


def make(style: str, groups: int = 1) -> Made:
    torch.manual_seed(0)
    return Made(
        style,
        params={name: torch.randn(shape) for name, shape in SHAPES.items()},
        buffers={"h.0.mask": torch.ones(3, 3, dtype=torch.bool), "h.1.scale": torch.ones(2, dtype=torch.bfloat16)},
        moments={name: torch.randn(shape) for name, shape in SHAPES.items()},
        groups=groups,
    )


def assert_sealed(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def convert(folder: Path, *parts: str, verify: bool = False, **options: Any) -> None:
    execute(plan_conversion(folder, parts, **options), verify=verify)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 8]))
